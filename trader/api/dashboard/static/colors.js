// @ts-check
// Colors of models and variants, readable on both backgrounds.
const FALLBACK = '#6b7686'

function channels(color) {
  const digits = /^#[0-9a-f]{6}$/i.test(color) ? color : FALLBACK
  return [1, 3, 5].map(place => parseInt(digits.slice(place, place + 2), 16))
}

function luminance(parts) {
  const [red, green, blue] = parts.map(part =>
    part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4,
  )
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue
}

/** Identities: easy to tell apart on both grounds, and none in the hues of gain (green) and loss (red). */
const IDENTITIES = [
  '#4f7df0',
  '#e8871e',
  '#9b5de5',
  '#17a5b8',
  '#d44fb8',
  '#c9a20a',
  '#8a6242',
  '#3d4bb8',
  '#6cb8f0',
  '#7a2e8e',
  '#d8a070',
  '#6b7fa3',
]
const SHADES = [1, 0.72, 1.3]

/** The color of the model in a place of the list of all: the first dozen differ in hue, the next ones in lightness too. */
export function identityOf(place) {
  const shade = SHADES[Math.floor(place / IDENTITIES.length) % SHADES.length]
  return hex(channels(IDENTITIES[place % IDENTITIES.length]).map(part => Math.min(255, part * shade)))
}

/** The color, turned to the nearest hue that means neither gain nor loss. */
export function neutral(color) {
  const [red, green, blue] = channels(color)
  const [most, least] = [Math.max(red, green, blue), Math.min(red, green, blue)]
  const span = most - least
  if (span < 40) return color // a gray has no hue
  const hue =
    (60 * (most === red ? (green - blue) / span : most === green ? 2 + (blue - red) / span : 4 + (red - green) / span) +
      360) %
    360
  const turned =
    hue >= 333 || hue < 10 ? 322 : hue < 22 ? 32 : hue > 90 && hue < 130 ? 60 : hue >= 130 && hue < 176 ? 186 : hue
  return turned === hue
    ? color
    : hex(
        [0, 240, 120].map(shift => {
          const away = Math.abs(((turned + shift + 180) % 360) - 180)
          return least + span * Math.min(1, Math.max(0, 2 - away / 60))
        }),
      )
}

const hex = parts => `#${parts.map(part => Math.round(part).toString(16).padStart(2, '0')).join('')}`

const system = matchMedia('(prefers-color-scheme: dark)')

export function isDark() {
  const chosen = document.documentElement.dataset.theme
  return chosen ? chosen === 'dark' : system.matches
}

/** The color, darkened on a light background or lightened on a dark one until a thin line has a contrast of 3 : 1. */
export function onGround(color) {
  const dark = isDark()
  const key = `${dark} ${color}`
  if (!kept.has(key)) kept.set(key, readable(color, dark))
  return kept.get(key)
}

const kept = new Map()

function readable(color, dark) {
  const ground = dark ? 0.007 : 1
  let parts = channels(color)
  for (let step = 0; step < 12; step += 1) {
    const [high, low] = [luminance(parts), ground].sort((one, other) => other - one)
    if ((high + 0.05) / (low + 0.05) >= 3) break
    parts = parts.map(part => (dark ? part + (255 - part) * 0.12 : part * 0.9))
  }
  return hex(parts)
}

/** Black or white, whichever is easier to read on the color. */
export const inkOn = color => (luminance(channels(color)) > 0.18 ? '#000000' : '#ffffff')

/** Call `change` whenever the color scheme changes; returns a function that stops this. */
export function onScheme(change) {
  const observer = new MutationObserver(change)
  system.addEventListener('change', change)
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] })
  return () => {
    system.removeEventListener('change', change)
    observer.disconnect()
  }
}

/** The inks of charts, by the custom properties of base.css that have both schemes. */
const INKS = {
  ground: 'panel',
  text: 'soft',
  grid: 'line',
  gain: 'gain',
  loss: 'loss',
  volume: 'line-strong',
  accent: 'accent',
  warn: 'warn',
}
const read = {}

export function inks() {
  const dark = Number(isDark())
  const style = getComputedStyle(document.documentElement)
  const of = ([name, property]) => [name, style.getPropertyValue(`--${property}`).match(/#\w+/g)[dark]]
  return (read[dark] ??= Object.fromEntries(Object.entries(INKS).map(of)))
}
