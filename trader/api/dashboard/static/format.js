// @ts-check
// Formats of figures, times and names. Nothing is rounded silently: titles have the full figure.
const NONE = '–'
const MINUS = '−'

const isFigure = value => typeof value === 'number' && Number.isFinite(value)

const kept = new Map()
/** @param {Intl.NumberFormatOptions['signDisplay']} signDisplay */
function digits(minimum, maximum, signDisplay = 'negative') {
  const key = `${minimum}:${maximum}${signDisplay}`
  if (!kept.has(key))
    kept.set(
      key,
      new Intl.NumberFormat('en-US', { minimumFractionDigits: minimum, maximumFractionDigits: maximum, signDisplay }),
    )
  return kept.get(key)
}

/** @param {Intl.NumberFormatOptions['signDisplay']} [sign] */
export function number(value, places = 2, sign) {
  const figure = typeof value === 'string' && value !== '' ? Number(value) : value
  if (figure === Infinity || value === 'Infinity') return '∞'
  return isFigure(figure) ? digits(places, places, sign).format(figure).replace('-', MINUS) : NONE
}

export function signed(value, places = 2, unit = '') {
  const text = number(value, places, 'exceptZero')
  return text === NONE ? text : text + unit
}

export const percent = (value, places = 2) => (isFigure(value) ? `${number(value, places)}\u00a0%` : NONE)
export const signedPercent = (value, places = 2) => signed(value, places, '\u00a0%')
export const whole = value => number(value, 0)

/** A name within a sentence, isolated: its direction of writing does not turn the words around it. */
export const isolated = name => `\u2068${name}\u2069`

/** A price with as many digits as its size requires. */
export function price(value) {
  const figure = Number(value)
  if (value == null || !Number.isFinite(figure)) return NONE
  const size = Math.abs(figure)
  const places = size >= 10000 ? 1 : size >= 100 ? 2 : size >= 1 ? 4 : 6
  return digits(Math.min(2, places), places).format(figure).replace('-', MINUS)
}

export function quantity(value) {
  const figure = Number(value)
  return value == null || !Number.isFinite(figure) ? NONE : digits(0, 6).format(figure)
}

/** A multiple, such as a leverage. */
export const times = value =>
  value == null || !Number.isFinite(Number(value)) ? NONE : `${digits(0, 2).format(Number(value))}×`

/** The class of a gain or a loss; of neither, if the figure rounds to nothing as it is shown. */
export const tone = (value, places = 2) =>
  Math.abs(Number(value)) < 0.5 * 10 ** -places ? '' : Number(value) > 0 ? 'gain' : Number(value) < 0 ? 'loss' : ''

const two = value => String(value).padStart(2, '0')
const MONTHS = ['Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec']

/** Whether times are shown in the reader's time zone, or in UTC, as the service records them. */
export function isLocalTime() {
  try {
    return localStorage.getItem('times') === 'local'
  } catch {
    return false
  }
}

export function switchTimes() {
  try {
    localStorage.setItem('times', isLocalTime() ? 'utc' : 'local')
  } catch {
    return
  }
  location.reload()
}

const isLocal = isLocalTime()
export const ZONE = isLocal ? 'local time' : 'UTC'

/** The date whose UTC parts are to be shown. */
function shown(value) {
  const at = new Date(value)
  return isLocal ? new Date(at.getTime() - at.getTimezoneOffset() * 60_000) : at
}

/** The minute of a time as the value of a datetime-local input; empty without a time. */
export function minuteOf(text) {
  const at = shown(text)
  return Number.isNaN(at.getTime()) ? '' : at.toISOString().slice(0, 16)
}

/** The time in UTC of such an input's value; empty if the value is. */
export const timeOf = minute =>
  minute ? `${new Date(isLocal ? minute : `${minute}Z`).toISOString().slice(0, 16)}Z` : ''

export function clock(value, withSeconds = true) {
  const at = shown(value)
  if (value == null || Number.isNaN(at.getTime())) return NONE
  return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}${withSeconds ? `:${two(at.getUTCSeconds())}` : ''}`
}

export function day(value) {
  const at = shown(value)
  return Number.isNaN(at.getTime()) ? NONE : `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]}`
}

export function moment(value) {
  if (value == null) return NONE
  return shown(value).toISOString().slice(0, 10) === shown(Date.now()).toISOString().slice(0, 10)
    ? clock(value)
    : `${day(value)}, ${clock(value, false)}`
}

export function span(milliseconds) {
  const seconds = Math.max(0, milliseconds / 1000)
  if (seconds < 10) return `${number(seconds, 1)} s`
  if (seconds < 120) return `${whole(seconds)} s`
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${two(Math.floor((seconds % 3600) / 60))} min`
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`
}

/** A figure of the statistics; those without a value are texts. */
export const figureOf = value => (typeof value === 'number' ? value : value === 'Infinity' ? Infinity : null)

/** The share of wins with its 95 % interval, for at least ten trades. */
export const wonOf = figures =>
  figures?.winRateInterval
    ? `won ${percent(figureOf(figures.winRate), 0)} (${percent(figures.winRateInterval.low, 0)} to ${percent(figures.winRateInterval.high, 0)})`
    : ''
