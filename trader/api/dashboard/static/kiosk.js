// @ts-check
// The kiosk, `?tv=1`: each model in turn in the chart, with its words, and a trade that closes as soon as it does.
import { setChoices } from './address.js'
import { Key, Panel, Side } from './components.js'
import { LastWords } from './conversations.js'
import { Curves } from './curves.js'
import { signed, signedPercent, span, tone } from './format.js'
import { html, useEffect, useRef, useState } from './lib.js'
import { entrantName, useModels } from './models.js'
import { Standings, useStandings } from './standings.js'
import { useLive } from './store.js'
import { Strip } from './strip.js'
import { percentOfNotional } from './trade_figures.js'

const TURN_MS = 15_000

export function Kiosk({ window }) {
  const known = useModels()
  const { trades } = useLive()
  const standings = useStandings(window)
  const [turn, setTurn] = useState(0)
  const [closed, setClosed] = useState(null)
  const latest = useRef(null)
  const rows = standings.rows ?? []
  const row = rows[turn % Math.max(1, rows.length)]
  const shownId = closed?.modelId ?? row?.one.modelId
  useEffect(() => {
    const timer = setInterval(() => {
      setClosed(null)
      setTurn(before => before + 1)
    }, TURN_MS)
    return () => clearInterval(timer)
  }, [closed])
  useEffect(() => {
    const [first] = trades ?? []
    if (latest.current && first && first.id !== latest.current) setClosed(first)
    latest.current = first?.id ?? latest.current
  }, [trades])
  useEffect(() => {
    if (shownId) setChoices({ alone: shownId })
  }, [shownId])
  return html`<div class="arena kiosk"><${Strip} />
    <div class="left"><${Standings} window=${window} standings=${standings} /></div>
    <${Curves} window=${window} entrants=${standings.board.data?.entries} isWhole=${true} />
    <div class="tabs"><${Panel} title=${closed ? 'Closed' : 'In turn'}><div class="body stack">${
      closed
        ? html`<${Closed} trade=${closed} color=${known.colorOf(closed.modelId, closed.modelVariant)} />`
        : row &&
          html`<h2 class="big"><${Key} color=${known.colorOf(row.one.modelIds[0], row.one.variant)} /> <bdi>${entrantName(row.one)}</bdi></h2>
            <p class=${`huge figure ${tone(row.return_)}`}>${signedPercent(row.return_)}</p>
            <${LastWords} modelId=${row.one.modelIds[0]} key=${row.one.modelIds[0]} />`
    }</div></${Panel}></div></div>`
}

const Closed = ({ trade, color }) => html`<h2 class="big"><${Key} color=${color} /> <bdi>${trade.modelName}</bdi></h2>
  <p class="big"><${Side} side=${trade.side} /> ${trade.symbol} closed by ${trade.closeReason}</p>
  <p class=${`huge figure ${tone(trade.netPnl)}`}>${signed(trade.netPnl)}</p>
  <p>${signedPercent(percentOfNotional(trade, trade.netPnl))} of the notional, held ${span(Date.parse(trade.closedAt) - Date.parse(trade.openedAt))}</p>
  <${LastWords} modelId=${trade.modelId} key=${trade.id} />`
