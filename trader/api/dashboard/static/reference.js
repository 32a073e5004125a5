// The reference page: the document, search over paths, texts and fields, buttons that copy, and trying a procedure out.
import { html, render } from './lib.js'
import { Reference } from './reference_document.js'

const response = await fetch('openapi.json')
render(html`<${Reference} document=${await response.json()} />`, document.querySelector('.layout'))
if (location.hash) location.replace(location.hash)

const search = document.querySelector('input[type=search]')
const entries = [...document.querySelectorAll('article')].map(article => ({
  shown: [article, document.querySelector(`nav a[href="#${article.id}"]`).parentElement],
  text: article.textContent.toLowerCase(),
}))
const groups = [...document.querySelectorAll('[data-group]')]
const index = document.querySelector('nav details')
const narrow = matchMedia('(max-width: 800px)')

search.addEventListener('input', () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean)
  for (const { shown, text } of entries) {
    const isHidden = !words.every(word => text.includes(word))
    for (const element of shown) element.classList.toggle('hidden', isHidden)
  }
  for (const group of groups)
    group.classList.toggle(
      'hidden',
      !group.querySelector(':scope > article:not(.hidden), :scope > ul > li:not(.hidden)'),
    )
  if (words.length) index.open = true
})
addEventListener('keydown', event => {
  if (event.key === '/' && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault()
    search.focus()
  }
})

const fold = () => {
  index.open = !narrow.matches
}
fold()
narrow.addEventListener('change', fold)
index.addEventListener('click', event => {
  if (narrow.matches && event.target.matches('a')) index.open = false
})

for (const block of document.querySelectorAll('pre')) {
  const text = block.textContent
  const button = document.createElement('button')
  button.type = 'button'
  button.className = 'copy'
  button.textContent = 'Copy'
  button.addEventListener('click', async () => {
    const done = await navigator.clipboard?.writeText(text).then(
      () => 'Copied',
      () => null,
    )
    button.textContent = done ?? 'Select and copy'
    setTimeout(() => {
      button.textContent = 'Copy'
    }, 1500)
  })
  block.append(button)
}

for (const trial of document.querySelectorAll('.try')) {
  const [input, token] = trial.querySelectorAll('textarea, input')
  const button = trial.querySelector('button')
  const shown = trial.querySelector('pre')
  button.addEventListener('click', async () => {
    button.disabled = true
    shown.hidden = false
    shown.textContent = '…'
    const began = performance.now()
    try {
      const response = await fetch(trial.dataset.path, {
        method: 'POST',
        body: input.value,
        headers: token?.value ? { authorization: `Bearer ${token.value}` } : {},
      })
      const text = await response.text()
      const took = Math.round(performance.now() - began)
      shown.textContent = `${response.status} in ${took} ms\n\n${indented(text)}`
    } catch (error) {
      shown.textContent = `There was no answer: ${error.message}`
    }
    button.disabled = false
  })
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2)
  } catch {
    return text
  }
}
