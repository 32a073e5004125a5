// @ts-check
// The order of figures and names.
const names = new Intl.Collator('en', { numeric: true, sensitivity: 'base' })

/** The order of two figures or names: without a value first, "Model 2" before "Model 10". */
export function compare(one, other) {
  if (one === other) return 0
  if (one == null || other == null) return one == null ? -1 : 1
  if (typeof one === 'string' && typeof other === 'string') return names.compare(one, other)
  return one < other ? -1 : 1
}
