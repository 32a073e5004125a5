// @ts-check
// The overview: who leads, the curves, all accounts together, the leaderboard, positions and events.
import { useAnswer } from './answers.js'
import { Board } from './board.js'
import { Tile, useStages } from './components.js'
import { Curves } from './curves.js'
import { Feed } from './feed.js'
import { figureOf, moment, number, signed, signedPercent, tone, whole } from './format.js'
import { html, useState } from './lib.js'
import { Leader } from './leader.js'
import { useWindow } from './models.js'
import { useLive } from './store.js'
import { Positions, positionsOf } from './trades.js'

export function Overview({ route }) {
  const [window, setWindow] = useWindow(route)
  const [isDrawn, setDrawn] = useState(false)
  const stage = useStages(isDrawn, 4)
  return html`
    <div class="split">
      <div class="stack">
        <${Leader} window=${window} />
        <${Curves} window=${window} onDrawn=${() => setDrawn(true)} />
        ${stage > 0 && html`<${Summary} />`}
        ${stage > 1 && html`<${Board} window=${window} onWindow=${setWindow} isCompact=${true} />`}
        ${stage > 3 && html`<${Positions} isCompact=${true} />`}
      </div>
      <div class="side">${stage > 2 && html`<${Feed} window=${window} />`}</div>
    </div>`
}

/** All accounts of models together, from the live streams: the first four add up to the equity. */
function Summary() {
  const state = useLive()
  const stats = useAnswer('analytics.getModelStats', { variant: 'all' }) // the same input as the leaderboard
  const run = useAnswer('analytics.getRunInfo')
  const snapshots = state.portfolio?.snapshots ?? []
  const ids = new Set(snapshots.map(snapshot => snapshot.modelId))
  const overall = (stats.data?.overall ?? []).filter(row => ids.has(row.modelId))
  const held = positionsOf(state, position => ids.has(position.modelId))
  const equity = sum(snapshots, snapshot => snapshot.netPortfolio)
  const unrealized = sum(snapshots, snapshot => snapshot.unrealizedPnl)
  const realized = sum(overall, row => figureOf(row.totalPnl))
  const cost = sum(
    overall.filter(row => !row.costIsDeclared),
    row => figureOf(row.costUsd),
  )
  const capital = sum(overall, row => row.startValue)
  const known = overall.length > 0 && overall.length === ids.size
  const equityOf = state.portfolio ? `= Equity of ${whole(snapshots.length)} models` : '= Equity'
  const paid = equity - capital - realized - unrealized
  const show = (value, write = number) => (known ? write(value) : '–')
  return html`<section class="panel summary" aria-label="All accounts together"><div class="body tiles">
    <${Tile} label="Start" value=${show(capital)} note=${run.data ? `since ${moment(run.data.runStartTime)}` : ''} />
    <${Tile} label="+ Realized, net" value=${show(realized, signed)} kind=${tone(realized)}
      note=${run.data ? `${whole(run.data.trades)} completed trades` : ''} />
    <${Tile} label="+ Unrealized" value=${show(unrealized, signed)} kind=${tone(unrealized)}
      note=${state.positions ? `${whole(held.length)} open positions` : ''} />
    <${Tile} label="+ Paid for open positions" value=${show(paid, signed)} kind=${tone(paid)}
      note="fees and funding so far" />
    <${Tile} label=${equityOf} value=${show(equity)}
      note=${
        known &&
        html`<span
        class=${tone(equity - capital)}>${signedPercent(capital > 0 ? (100 * equity) / capital - 100 : null)}</span> since the start`
      } />
    <${Tile} label="Model cost, USD" value=${stats.data ? number(cost) : '–'}
      note=${run.data ? `${whole(run.data.invocations)} invocations; not in the equity` : ''} />
  </div></section>`
}

const sum = (list, of) => list.reduce((total, item) => total + (of(item) ?? 0), 0)
