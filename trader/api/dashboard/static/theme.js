// @ts-check
// Color scheme: the reader's choice, kept by the browser, is applied before the first paint.
;(() => {
  try {
    const chosen = localStorage.getItem('theme')
    if (chosen) document.documentElement.dataset.theme = chosen
  } catch {
    /* storage is blocked: the scheme of the system applies */
  }
})()
