// @ts-check
// The page of one variant: its figures, and the curves, board, positions, trades and conversations of its models.
import { useAnswer } from './answers.js'
import { Board } from './board.js'
import { Key, Panel, Tile } from './components.js'
import { Conversations } from './conversations.js'
import { Curves } from './curves.js'
import { signed, tone, whole, wonOf } from './format.js'
import { html, useMemo } from './lib.js'
import { useModels, useWindow } from './models.js'
import { Positions, TradeTotals, Trades } from './trades.js'

export function VariantPage({ route, id }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const stats = useAnswer('variants.getVariantStats')
  const variant = known.byVariant.get(id)
  const figures = stats.data?.stats.find(one => one.variantId === id)
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
      <${Curves} window=${window} only=${only} />
      <${Board} window=${window} onWindow=${setWindow} variant=${id} isCompact=${true} />
      <${Positions} only=${one => one.modelVariant === id} isCompact=${true} />
      <${TradeTotals} variant=${id} />
      <${Trades} variant=${id} hasFilter=${false} />
    </div><div class="side"><${Conversations} variant=${id} groups=${20} isSide=${true} /></div></div>`
}
