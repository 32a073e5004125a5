// @ts-check
// Shared knowledge of models and variants: colors, and which of them are rule baselines.
import { knownAnswer, knownReport, useAnswer } from './answers.js'
import { useMemo } from './lib.js'
import { compare } from './order.js'

const WINDOWS_MS = { '24h': 86_400_000, '7d': 7 * 86_400_000, '30d': 30 * 86_400_000 }
export const WINDOWS = [
  ['24h', '24 h'],
  ['7d', '7 d'],
  ['30d', '30 d'],
  ['run', 'Run'],
]

/** Every model and variant: {models, variants, nameOf(modelId), colorOf(modelId, variant), isBaseline(modelId)}. */
export function useModels() {
  const models = useAnswer('models.getModels')
  const variants = useAnswer('variants.getVariants', {}, 0)
  return useMemo(() => {
    const byId = new Map((models.data?.models ?? []).map(one => [one.id, one]))
    const byVariant = new Map((variants.data?.variants ?? []).map(one => [one.id, one]))
    const hasOthers = [...byId.values()].some(one => one.provider !== 'rules')
    return {
      entry: models,
      warning: models.data?.warning,
      models: [...byId.values()].sort((one, other) => compare(one.name, other.name)),
      variants: [...byVariant.values()],
      byId,
      byVariant,
      nameOf: id => distinctName(id, byId.get(id)?.name ?? id),
      nameOfAll: ids => {
        const name = byId.get(ids[0])?.name ?? ids[0]
        return entrantName({ modelIds: ids, modelName: (ids.length > 1 && name.replace(/[ -]*\d+$/, '')) || name })
      },
      colorOf: (id, variant) => byId.get(id)?.color ?? byVariant.get(byId.get(id)?.variant ?? variant)?.color,
      isBaseline: id => hasOthers && byId.get(id)?.provider === 'rules',
    }
  }, [models.data, models.error, variants.data])
}

/** The start of the models, as last read or else as served with the page. */
const runStart = () => Date.parse(knownAnswer('analytics.getRunInfo')?.runStartTime ?? document.body.dataset.run)

/** The time of the service (in a replay, the time of its prices), as last read or else as served with the page. */
export const serviceNow = () => Date.parse(knownReport('/health')?.timestamp ?? document.body.dataset.now) || Date.now()

/** The window of an address. Default: seven days, or the whole run if it is younger than a day. */
export function windowOf(query) {
  const asked = WINDOWS.find(([key]) => key === query.get('window'))?.[0]
  return asked ?? (serviceNow() - runStart() < WINDOWS_MS['24h'] ? 'run' : '7d')
}

/** The window of the address, and its setter. */
export function useWindow(route) {
  useAnswer('analytics.getRunInfo')
  return [windowOf(route.query), window => route.set('window', window)]
}

/** The name of an entrant: of its account, or what the names of replicates have in common, and how many they are. */
export function entrantName({ modelIds, modelName }) {
  if (modelIds.length < 2) return distinctName(modelIds[0], modelName)
  return `${distinctName(modelIds[0], modelName.split(' (mean of ')[0])} (mean of ${modelIds.length})`
}

/** The variants of the models whose names are repeated, by their ids, for each list of models. */
const repeated = new WeakMap()

/** The name of a model, with its variant if another model has the same name. */
export function distinctName(id, name) {
  const models = knownAnswer('models.getModels')?.models
  if (!models) return name
  if (!repeated.has(models)) {
    const counts = new Map()
    for (const model of models) counts.set(model.name, (counts.get(model.name) ?? 0) + 1)
    const those = models.filter(model => counts.get(model.name) > 1)
    repeated.set(models, new Map(those.map(model => [model.id, model.variant])))
  }
  const variant = repeated.get(models).get(id)
  return variant && !name.endsWith(` · ${variant}`) ? `${name} · ${variant}` : name
}

/**
 * The address of the comparison of two models; on its page the reader chooses one that is missing.
 * @param {any} [window]
 */
export const compareHref = (one, other = '', window = '') => `#/compare?${new URLSearchParams({ one, other, window })}`
