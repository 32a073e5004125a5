// @ts-check
// The page of one variant: its figures, and the curves, board, positions, trades and conversations of its models.
import { useAnswer } from './answers.js'
import { Board } from './board.js'
import { Key, Tile, useStages } from './components.js'
import { Conversations } from './conversations.js'
import { Curves } from './curves.js'
import { signed, tone, whole, wonOf } from './format.js'
import { html, useMemo, useState } from './lib.js'
import { useModels, useWindow } from './models.js'
import { Positions, TradeTotals, Trades } from './trades.js'

export function VariantPage({ route, id }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const stats = useAnswer('variants.getVariantStats')
  const variant = known.byVariant.get(id)
  const figures = stats.data?.stats.find(one => one.variantId === id)
  const [isDrawn, setDrawn] = useState(false)
  const stage = useStages(isDrawn, 5)
  const only = useMemo(() => one => one.variant === id || Boolean(one.baseline && !one.variant), [id])
  if (known.variants.length && !variant)
    return html`<p class="notice">There is no variant ${id}. <a href="#/models">All models and variants</a></p>`
  if (!variant) return html`<div class="empty">Reading …</div>`
  return html`
    <div class="title"><${Key} color=${variant.color} /><h1>${variant.label}</h1><span
      class="badge">temperature ${variant.temperature}</span></div>
    <p class="lede">${variant.description}</p>
    <section class="panel" aria-label="Figures"><div class="body tiles">
      <${Tile} label="Models" value=${whole(figures?.modelCount)} />
      <${Tile} label="Realized, net" value=${signed(figures?.totalPnl)} kind=${tone(figures?.totalPnl)} />
      <${Tile} label="Completed trades" value=${whole(figures?.totalTrades)} note=${wonOf(figures)} />
      <${Tile} label="Average per trade" value=${signed(figures?.avgPnl)} kind=${tone(figures?.avgPnl)} />
    </div></section>
    <div class="split"><div class="stack">
      <${Curves} window=${window} only=${only} onDrawn=${() => setDrawn(true)} />
      ${stage > 0 && html`<${Board} window=${window} onWindow=${setWindow} variant=${id} />`}
      ${stage > 1 && html`<${Positions} only=${one => one.modelVariant === id} isCompact=${true} />`}
      ${stage > 2 && html`<${TradeTotals} variant=${id} />`}
      ${stage > 3 && html`<${Trades} variant=${id} hasFilter=${false} />`}
    </div><div class="side">${
      stage > 4 && html`<${Conversations} variant=${id} groups=${20} isSide=${true} />`
    }</div></div>`
}
