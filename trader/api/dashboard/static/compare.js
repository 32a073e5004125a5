// @ts-check
// Two entrants compared: their difference with its interval, what each cost, where they disagreed, and their trades.
import { useChosen } from './address.js'
import { useAnswer } from './answers.js'
import { timeChart } from './charts.js'
import {
  Choice,
  Pending,
  ModelName,
  Money,
  Panel,
  Select,
  Side,
  Table,
  Time,
  figureColumn,
  modelColumn,
  moneyColumn,
  useChart,
} from './components.js'
import { boundsOf, commonHours, kindOf, sentenceOf } from './evidence.js'
import { figureOf, number, percent, signedPercent, span, tone, whole } from './format.js'
import { html, useMemo } from './lib.js'
import { WINDOWS, useModels, useWindow } from './models.js'
import { useTrades } from './trades.js'

const CHART_PX = 240
const LEAST_SPAN = 0.2
const TRADES = 200
const HOUR_MS = 3_600_000

export function ComparePage({ route }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const chosen = [useChosen('one', '', true), useChosen('other', '', true)]
  const ids = chosen.map(([id]) => id)
  const [one, other] = ids
  const models = ids.map(id => known.byId.get(id))
  const tools = html`<div class="filters">${chosen.map(
    (
      [id, choose],
      place,
    ) => html`<${Select} key=${place} label=${place ? 'Against' : 'Model'} value=${id} onChange=${choose}
      options=${[['', 'Choose a model'], ...known.models.map(each => [each.id, known.nameOf(each.id)])]} />`,
  )}</div><${Choice} label="Window" value=${window} onChange=${setWindow} options=${WINDOWS} />`
  const unknown = known.entry.data && ids.find(id => id && !known.byId.has(id))
  return html`<${Panel} title="Difference" tools=${tools}>
      <${Pending} entry=${known.entry} what="The models" />
      ${unknown && html`<p class="notice">There is no model ${unknown}.</p>`}
      ${
        models[0] && models[1]
          ? html`<${Difference} ids=${ids} window=${window} known=${known} key=${ids.join()} />`
          : html`<p class="empty">Choose two models.</p>`
      }
    </${Panel}>
    ${
      models[0] &&
      models[1] &&
      html`<${Costs} ids=${ids} known=${known} />
      <${Disagreements} ids=${ids} names=${ids.map(known.nameOf)} window=${window} />
      <${SameHours} one=${one} other=${other} names=${ids.map(known.nameOf)} window=${window} key=${`trades ${ids}`} />`
    }`
}

const useComparison = ([modelId, against], window) => useAnswer('analytics.getComparison', { modelId, against, window })

function Difference({ ids, window, known }) {
  const entry = useComparison(ids, window)
  const [one, other] = ids.map(id => known.byId.get(id))
  const inputs = useMemo(() => entry.data?.curve.length > 1 && drawingOf(entry.data.curve, one.color), [entry.data])
  const [host] = useChart(
    (element, ...drawn) =>
      timeChart(element, ...drawn, {
        height: CHART_PX,
        show: percent,
        write: signedPercent,
        span: LEAST_SPAN,
      }),
    inputs,
  )
  const found = entry.data?.difference
  const last = entry.data?.curve.at(-1)
  const names = (entry.data?.modelIds ?? []).map((some, place) => known.nameOfAll(some.length ? some : [ids[place]]))
  return html`<div class="body stack">
    <${Pending} entry=${entry} what="The comparison" />
    ${
      found &&
      html`<p><${Entrant} ids=${entry.data.modelIds[0]} model=${one} name=${names[0]} /> against <${Entrant}
      ids=${entry.data.modelIds[1]} model=${other} name=${names[1]} />: <b class=${`figure ${tone(found.differencePercent)}`}
        title=${found.differencePercent}>${signedPercent(found.differencePercent ?? last?.differencePercent)}</b> ${` over ${commonHours(found)}, ${
          found.interval ? `95 % interval, one look: ${boundsOf(found.interval)}` : 'no interval yet'
        }.`} <span class=${kindOf(found.verdict)}>${sentenceOf(found)}</span></p>`
    }
    <div class="chart" ref=${host} style=${{ minHeight: `${CHART_PX}px` }} role="img"
      aria-label=${
        `How far ${names[0] ?? one.name} is ahead of ${names[1] ?? other.name}, in percent over time, ` +
        'with the 95 % interval of one look at each hour'
      }></div>
    <p class="soft small">The band is the 95 % interval of a single look at each hour; the verdict covers all common hours
      of the run and stays valid however often you look. Replicates of one configuration are compared by their mean.</p>
  </div>`
}

const Entrant = ({ ids, model, name }) =>
  html`<${ModelName} id=${ids.length > 1 ? '' : model.id} name=${name} color=${model.color} isLinked=${ids.length < 2} />`

/** The difference in the color of the first model, over the band of its intervals. */
function drawingOf(curve, color) {
  const bound = name => ({ name, color, isUnnamed: true, isDimmed: true, isDashed: true, isBand: true })
  return [
    curve.map(each => Date.parse(each.at) / 1000),
    [bound('upper end'), bound('lower end'), { name: 'difference', color, isMain: true }],
    [
      curve.map(each => each.interval?.high ?? null),
      curve.map(each => each.interval?.low ?? null),
      curve.map(each => each.differencePercent),
    ],
  ]
}

/** What each of the two costs in its current run: the models' providers, and the market. */
function Costs({ ids, known }) {
  const stats = useAnswer('analytics.getModelStats', { variant: 'all' })
  const totals = ids.map(modelId => useAnswer('analytics.getTradeTotals', { by: 'side', modelId }))
  const rows = ids.flatMap((id, place) => {
    const one = stats.data?.overall?.find(each => each.modelId === id)
    const sumOf = name => totals[place].data?.rows.reduce((sum, row) => sum + row[name], 0)
    return one ? [{ ...one, fees: sumOf('fees'), funding: sumOf('funding') }] : []
  })
  const columns = [
    modelColumn(known),
    figureColumn('trades', 'Trades', one => one.tradesCount, whole),
    moneyColumn('pnl', 'Realized, net', one => one.totalPnl),
    figureColumn('fees', 'Fees', one => one.fees),
    figureColumn('funding', 'Funding', one => one.funding),
    figureColumn('cost', 'Model cost', one => figureOf(one.costUsd)),
    moneyColumn('net', 'Net after cost', one => figureOf(one.netAfterCost)),
  ]
  return html`<${Panel} title="Cost in the current run"><${Pending} entry=${stats} what="The statistics" />
    ${
      stats.data &&
      html`<${Table} label="Cost" narrow=${['model', 'pnl', 'net']} columns=${columns} rows=${rows} isEven=${true}
      empty="Neither has traded yet." />`
    }</${Panel}>`
}

function Disagreements({ ids, names, window }) {
  const entry = useComparison(ids, window)
  const side = held => (held ? html`<${Side} side=${held} />` : html`<span class="soft">flat</span>`)
  const columns = [
    { key: 'market', title: 'Market', isText: true, by: one => one.symbol, cell: one => one.symbol },
    {
      key: 'since',
      title: 'Since',
      isText: true,
      by: one => one.since,
      cell: one => html`<${Time} at=${one.since} />`,
    },
    {
      key: 'hours',
      title: 'For',
      by: lastedMs,
      csv: one => ({ Hours: lastedMs(one) / HOUR_MS }),
      cell: one => span(lastedMs(one)),
    },
    { key: 'one', title: names[0], isText: true, by: one => one.side, cell: one => side(one.side) },
    { key: 'other', title: names[1], isText: true, by: one => one.againstSide, cell: one => side(one.againstSide) },
  ]
  return html`<${Panel} title="Disagreements">
    <p class="body lede">${
      entry.data &&
      `Hours in which either held a market, all markets together: ${number(entry.data.agreedHours, 1)} with both on the ` +
        `same side, ${number(entry.data.disagreedHours, 1)} not. The latest come first.`
    }</p>
    ${
      entry.data &&
      html`<${Table} label="Disagreements" narrow=${['market', 'since', 'one', 'other']} columns=${columns} rows=${entry.data.disagreements} first=${10}
      empty="They never disagreed in this window." />`
    }
  </${Panel}>`
}

const lastedMs = one => Date.parse(one.until) - Date.parse(one.since)

/** The trades of the two, side by side by the hour in which they were opened. */
function SameHours({ one, other, names, window }) {
  const of = [one, other].map(modelId => useTrades({ limit: TRADES, modelId }))
  const since = useComparison([one, other], window).data?.start ?? ''
  const rows = useMemo(() => {
    const byHour = new Map()
    of.forEach(({ trades }, place) => {
      for (const trade of trades) {
        const hour = `${trade.openedAt.slice(0, 13)}:00:00.000Z`
        if (trade.closedAt < since) continue
        if (!byHour.has(hour)) byHour.set(hour, { hour, trades: [[], []] })
        byHour.get(hour).trades[place].push(trade)
      }
    })
    return [...byHour.values()].sort((row, next) => (row.hour < next.hour ? 1 : -1))
  }, [of[0].trades, of[1].trades, since])
  const both = rows.filter(row => row.trades.every(some => some.length)).length
  const isCut = of.some(({ entry, trades }) => entry.data?.nextBefore && trades.at(-1).closedAt >= since)
  const columnOf = place => ({
    key: `trades-${place}`,
    title: names[place],
    isText: true,
    className: 'wrap',
    by: row => row.trades[place].reduce((sum, trade) => sum + trade.netPnl, 0),
    csv: row => ({
      [`${names[place]}, trades`]: row.trades[place].map(each => `${each.side} ${each.symbol}`).join('; '),
      [`${names[place]}, net`]: row.trades[place].reduce((sum, trade) => sum + trade.netPnl, 0),
    }),
    cell: row =>
      row.trades[place].map(
        each => html`<div key=${each.id}><a class="inline" href=${`#/trades/${each.id}`}>${each.symbol}</a> <${Side}
        side=${each.side} /> <${Money} value=${each.netPnl} /></div>`,
      ),
  })
  const columns = [
    {
      key: 'hour',
      title: 'Opened from',
      isText: true,
      by: row => row.hour,
      cell: row => html`<${Time} at=${row.hour} />`,
    },
    columnOf(0),
    columnOf(1),
  ]
  return html`<${Panel} title="Trades in the same hours">
    ${of.map(
      ({ entry }, place) => html`<${Pending} key=${place} entry=${entry}
      what=${`The trades of ${names[place]}`} />`,
    )}
    <p class="body lede">${`Both opened trades in ${whole(both)} of ${whole(rows.length)} hours${
      isCut ? `, of their latest ${TRADES} trades each` : ''
    }.`}</p>
    <${Table} label="Trades in the same hours" columns=${columns} rows=${rows} first=${20} isEven=${true}
      empty="Neither has completed a trade in this window." />
  </${Panel}>`
}
