// @ts-check
// The Markdown of the API's descriptions as elements: paragraphs, headings, lists, tables, blocks and spans of code.
import { html } from './lib.js'

/** A wide table scrolls on its own. */
export const Scroll = ({ children }) => html`<div class="scroll"><table>${children}</table></div>`

/** The text of one line, in which backticks mark code. */
export const Inline = ({ text }) =>
  text
    .split(/\s+/)
    .join(' ')
    .split('`')
    .map((part, place) => (place % 2 ? html`<code>${part}</code>` : part))

export const Markdown = ({ text }) => text.split(/\n{2,}/).map(block => html`<${Block} text=${block.trim()} />`)

function Block({ text }) {
  const lines = text.split('\n')
  if (!text) return null
  if (text.startsWith('```')) return html`<pre><code>${lines.slice(1, -1).join('\n')}</code></pre>`
  if (text.startsWith('## ')) return html`<h2><${Inline} text=${text.slice(3)} /></h2>`
  if (text.startsWith('- '))
    return html`<ul>${lines.map(line => html`<li><${Inline} text=${line.slice(2)} /></li>`)}</ul>`
  if (text.startsWith('| ')) {
    const [head, , ...rows] = lines.map(line => line.slice(2, -2).split(' | '))
    return html`<${Scroll}><thead><tr>${head.map(cell => html`<th>${cell}</th>`)}</tr></thead>
      <tbody>${rows.map(row => html`<tr>${row.map(cell => html`<td><${Inline} text=${cell} /></td>`)}</tr>`)}</tbody></${Scroll}>`
  }
  return html`<p><${Inline} text=${text} /></p>`
}
