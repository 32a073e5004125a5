// @ts-check
// The dashboard: its frame, its pages by address, and the state of the connection.
import { keepScroll, routeOf } from './address.js'
import { operatorToken, readAnswerAhead } from './answers.js'
import { ConversationPage, Conversations } from './conversations.js'
import { Later } from './components.js'
import { isDark } from './colors.js'
import { readCurvesAhead } from './curves.js'
import { clock, isLocalTime, switchTimes } from './format.js'
import { html, render, useEffect, useRef, useState } from './lib.js'
import { useModels } from './models.js'
import { Overview } from './overview.js'
import { connect, useLive } from './store.js'
import { Share } from './share.js'
import { Demo, Prices } from './strip.js'
import { SystemPage, useStatus } from './system.js'
import { PositionsPage, TradeTotals, Trades } from './trades.js'

const PAGES = [
  ['', 'Overview'],
  ['models', 'Models'],
  ['positions', 'Positions'],
  ['trades', 'Trades'],
  ['conversations', 'Conversations'],
  ['system', 'System'],
]
const { mode, version } = document.body.dataset

const ICON = new URL('icon.svg', import.meta.url).href
const restoreScroll = keepScroll()

function App() {
  const [route, setRoute] = useState(routeOf)
  useEffect(() => {
    const change = () =>
      setRoute(before => {
        const next = routeOf()
        if (before.page !== next.page || before.id !== next.id) {
          restoreScroll()
          document.querySelector('main').focus({ preventScroll: true })
        }
        return next
      })
    addEventListener('hashchange', change)
    addEventListener('keydown', shortcut)
    return () => {
      removeEventListener('hashchange', change)
      removeEventListener('keydown', shortcut)
    }
  }, [])
  const title =
    PAGES.find(([page]) => page === route.page)?.[1] ??
    { variants: 'Variant', markets: 'Market', compare: 'Compare', operator: 'Operator' }[route.page] ??
    'Not found'
  return html`
    <a class="visually-hidden" href="#content" onClick=${event => {
      event.preventDefault()
      document.querySelector('main').focus()
    }}>Skip to the content</a>
    <${Title} route=${route} page=${title} />
    <${Top} route=${route} />
    <main id="content" tabindex="-1">
      ${!route.id && html`<h1 class="visually-hidden">${title}</h1>`}
      <${Banners} />
      ${route.page !== '' && html`<${Demo} />`}
      <${Page} key=${`${route.page}/${route.id}`} route=${route} />
    </main>
    <footer class="page"><span>trader ${version}</span><button class="button" type="button"
      onClick=${switchTimes}>${isLocalTime() ? 'Times are local: show UTC' : 'Times are UTC: show local'}</button>
      <a href="/api/docs">API reference</a>
      <span>Keys: 1–6 pages, t light or dark, arrows in a chart</span></footer>`
}

/** The pages that are read when they are first opened: their modules, by their names. */
const LATER = {
  ModelsPage: () => import('./all_models.js'),
  ModelPage: () => import('./model.js'),
  VariantPage: () => import('./variant.js'),
  TradePage: () => import('./trade.js'),
  MarketPage: () => import('./market.js'),
  OperatorPage: () => import('./operator.js'),
  ComparePage: () => import('./compare.js'),
}

function Page({ route }) {
  const { page, id } = route
  const named = {
    models: id ? 'ModelPage' : 'ModelsPage',
    variants: id && 'VariantPage',
    trades: id && 'TradePage',
    markets: id && 'MarketPage',
    operator: 'OperatorPage',
    compare: 'ComparePage',
  }[page]
  if (named) return html`<${Later} load=${LATER[named]} name=${named} route=${route} id=${id} />`
  if (page === 'positions') return html`<${PositionsPage} />`
  if (page === 'trades') return html`<${TradeTotals}><${Trades} hasFilter=${false} /></${TradeTotals}>`
  if (page === 'conversations') return id ? html`<${ConversationPage} id=${id} />` : html`<${Conversations} />`
  if (page === 'system') return html`<${SystemPage} route=${route} />`
  if (page === '') return html`<${Overview} route=${route} />`
  return html`<p class="notice">There is no page with this name. <a href="#/">Overview</a></p>`
}

function Top({ route }) {
  const nav = useRef(null)
  useEffect(() => {
    // on a phone the pages are wider than the screen
    const link = nav.current.querySelector('[aria-current]')
    if (link) nav.current.scrollLeft = link.offsetLeft + link.offsetWidth / 2 - nav.current.clientWidth / 2
  }, [route.page])
  return html`<header class="top"><div>
    <a class="brand" href="#/" aria-label="trader, overview" tabindex="-1"><img src=${ICON} alt="" width="20" height="20" />trader</a>
    <span class=${`badge ${mode === 'live' ? 'loss' : ''}`}
      title=${mode === 'live' ? 'orders go to a real venue' : 'orders go to the paper exchange'}>${mode === 'live' ? 'live' : 'paper'}</span>
    <nav aria-label="Pages" ref=${nav}>${PAGES.map(
      ([page, name]) => html`<a key=${page} href=${`#/${page}`}
      aria-current=${page === route.page || (page === 'models' && ['variants', 'compare'].includes(route.page)) ? 'page' : undefined}>${name}</a>`,
    )}</nav>
    <div class="right">${route.page !== '' && html`<${Prices} hasLines=${false} />`}<${Status} /><a class="button" title="Halt or flatten, with the operator's token"
      href=${operatorToken() ? '#/system' : '#/operator'}>Stop</a><${Share} route=${route} />
      <button class="icon" type="button" aria-label="Light or dark" title="Light or dark (t)" onClick=${switchScheme}>
        <svg viewBox="0 0 16 16" aria-hidden="true"><circle cx="8" cy="8" r="6" fill="none" stroke="currentColor"
          stroke-width="1.5"></circle><path d="M8 2a6 6 0 010 12z" fill="currentColor"></path></svg></button></div>
  </div></header>`
}

/** The title of the browser's tab, which begins with the state unless that is as it should be. */
function Title({ route, page }) {
  const { word } = useStatus()
  const known = useModels()
  const named = { models: known.nameOf, trades: () => 'Trade', conversations: () => 'Decision' }[route.page]
  const text = route.id ? (named?.(route.id) ?? route.id) : page
  const title = `${word === 'live' ? '' : `${word} · `}${text} · trader`
  useEffect(() => {
    document.title = title
  }, [title])
}

function Status() {
  const state = useLive()
  const status = useStatus()
  return html`<span class="status"><span role="status"><a href="#/system"><i class=${`dot ${status.kind}`}
    aria-hidden="true"></i>${status.word}</a></span>
    <span title="time of the latest data">${state.dataAt ? clock(state.dataAt) : ''}</span></span>`
}

function Banners() {
  const { troubles } = useStatus()
  return html`<div class="banners" role="alert">${troubles.map(
    one => html`<p key=${one.text}
    class=${`notice ${one.kind}`}>${one.text}</p>`,
  )}</div>`
}

function switchScheme() {
  const next = isDark() ? 'light' : 'dark'
  document.documentElement.dataset.theme = next
  try {
    localStorage.setItem('theme', next)
  } catch {
    /* storage is blocked: the choice lasts as long as the page */
  }
}

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return
  const page = PAGES[Number(event.key) - 1]
  if (page) location.hash = `#/${page[0]}`
  if (event.key === 't') switchScheme()
}

const { page, query } = routeOf()
if (page === '') readCurvesAhead(query) // first, because they are drawn first
readAnswerAhead('models.getModels')
readAnswerAhead('analytics.getRunInfo')
connect()
render(html`<${App} />`, document.getElementById('app'))
