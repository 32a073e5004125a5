// @ts-check
// Colors of models and variants, which the service gives, made readable on both backgrounds.
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

/** The colors of a strategy's own series: those of the variants, and what lies between them. */
export const SERIES = ['#06b6d4', '#eab308', '#a855f7', '#3b82f6', '#e8871e', '#d946ef']

const hex = parts => `#${parts.map(part => Math.round(part).toString(16).padStart(2, '0')).join('')}`

const system = matchMedia('(prefers-color-scheme: dark)')
const paper = matchMedia('print')

export function isDark() {
  if (paper.matches) return false
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
  for (const media of [system, paper]) media.addEventListener('change', change)
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] })
  return () => {
    for (const media of [system, paper]) media.removeEventListener('change', change)
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
