// @ts-check
// Tables as CSV: every figure as it is, names as they are written, both ends of an interval, times in ISO 8601.
const STAYS_MS = 1_000

/**
 * The text of a table. A column is exported by `csv(row)`, a value or an object of values by their titles, else by the
 * value by which it sorts; a column with neither is a picture and is left out.
 */
export function csvOf(columns, rows) {
  const exported = columns.filter(column => column.csv ?? column.by)
  const fieldsOf = row =>
    exported.flatMap(column => {
      const value = (column.csv ?? column.by)(row)
      return typeof value === 'object' && value !== null ? Object.entries(value) : [[column.title, value]]
    })
  const lines = rows.map(fieldsOf)
  const heads = (lines[0] ?? []).map(([title]) => title)
  return [heads, ...lines.map(line => line.map(([, value]) => value))]
    .map(line => `${line.map(quoted).join(',')}\r\n`)
    .join('')
}

function quoted(value) {
  const text = String(value ?? '')
  // a spreadsheet would execute it
  const safe = /^[-=+@\t\r\n＝＋－＠]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text
  return `"${safe.replaceAll('"', '""')}"`
}

/** Save a blob as a file of the browser. */
export function save(name, blob) {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), STAYS_MS)
}
