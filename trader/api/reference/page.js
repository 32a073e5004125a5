const search = document.querySelector('input[type=search]')
const entries = [...document.querySelectorAll('[data-words]')]
const groups = [...document.querySelectorAll('[data-group]')]
search.addEventListener('input', () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean)
  for (const entry of entries) entry.classList.toggle('hidden', !words.every(word => entry.dataset.words.includes(word)))
  for (const group of groups) group.classList.toggle('hidden', !group.querySelector('[data-words]:not(.hidden)'))
})
addEventListener('keydown', event => {
  if (event.key === '/' && document.activeElement !== search) {
    event.preventDefault()
    search.focus()
  }
})
