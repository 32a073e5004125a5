// @ts-check
// The overview, one screen: the strip, the standings, the chart, and beside it what models say, do and hold.
import { useChosen } from './address.js'
import { Conversations } from './conversations.js'
import { Later, useStages } from './components.js'
import { Curves } from './curves.js'
import { Feed } from './feed.js'
import { html, useEffect, useState } from './lib.js'
import { useWindow } from './models.js'
import { Leader, Standings, useStandings } from './standings.js'
import { Strip } from './strip.js'
import { Positions, Trades } from './trades.js'

const KIOSK = () => import('./kiosk.js')

const WIDE = [
  ['chat', 'Chat'],
  ['events', 'Events'],
  ['positions', 'Positions'],
]
const NARROW = [
  ['standings', 'Standings'],
  ['chat', 'Chat'],
  ['positions', 'Positions'],
  ['trades', 'Trades'],
]
const narrow = matchMedia('(max-width: 760px)')

function useNarrow() {
  const [isNarrow, setNarrow] = useState(narrow.matches)
  useEffect(() => {
    const change = () => setNarrow(narrow.matches)
    narrow.addEventListener('change', change)
    return () => narrow.removeEventListener('change', change)
  }, [])
  return isNarrow
}

export function Overview({ route }) {
  const [window] = useWindow(route)
  const isKiosk = (route.query.get('tv') ?? new URLSearchParams(location.search).get('tv')) === '1'
  return isKiosk ? html`<${Later} load=${KIOSK} name="Kiosk" window=${window} />` : html`<${Arena} window=${window} />`
}

function Arena({ window }) {
  const isNarrow = useNarrow()
  const [isDrawn, setDrawn] = useState(false)
  const stage = useStages(isDrawn, 1)
  const standings = useStandings(window)
  const entrants = standings.board.data?.entries
  const list = html`<${Standings} window=${window} standings=${standings} />`
  return html`<div class="arena">
    ${!isNarrow && html`<${Strip} />`}
    <div class="left"><${Leader} standings=${standings} />${!isNarrow && list}</div>
    <${Curves} window=${window} entrants=${entrants} isWhole=${true} onDrawn=${() => setDrawn(true)} />
    <${Tabs} tabs=${isNarrow ? NARROW : WIDE} window=${window} list=${list} entrants=${entrants} isReady=${stage > 0} key=${isNarrow} />
  </div>`
}

/** The panels beside the chart, one at a time; the address keeps which. */
function Tabs({ tabs, window, list, entrants, isReady }) {
  const [chosen, choose] = useChosen('tab', '')
  const tab = tabs.find(([key]) => key === chosen)?.[0] ?? tabs[0][0]
  const move = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (!step) return
    const place = tabs.findIndex(([key]) => key === tab)
    choose(tabs.at((place + step) % tabs.length)[0])
    event.currentTarget.children[(place + step + tabs.length) % tabs.length].focus()
  }
  const panels = {
    standings: () => list,
    chat: () => html`<${Conversations} title="Chat" groups=${30} isSide=${true} />`,
    events: () => html`<${Feed} window=${window} entrants=${entrants} />`,
    positions: () => html`<${Positions} isCompact=${true} />`,
    trades: () => html`<${Trades} hasFilter=${false} isCompact=${true} />`,
  }
  return html`<div class="tabs"><div role="tablist" aria-label="Beside the chart" onKeyDown=${move}>${tabs.map(
    ([key, name]) => html`<button type="button" role="tab" key=${key} id=${`tab-${key}`} aria-controls="tab-panel"
      aria-selected=${key === tab ? 'true' : 'false'} tabindex=${key === tab ? 0 : -1} onClick=${() => choose(key)}>${name}</button>`,
  )}</div>
    <div role="tabpanel" id="tab-panel" aria-labelledby=${`tab-${tab}`}>${(isReady || tab === 'standings') && panels[tab]()}</div></div>`
}
