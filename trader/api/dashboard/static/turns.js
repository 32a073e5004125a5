// @ts-check
// Work in turns, each with a frame of its own, so that what comes at once makes no long task: parts of a page, rows of
// tables, and charts.
const FRAME_MAX_MS = 100 // a hidden tab draws none

/** @type {Set<() => void>} */
const waiting = new Set()
let isTurn = false

/**
 * Do a piece of work in a task of its own, after those that wait, and after the frame that shows the last one. A piece
 * that waits already keeps its place. Return a function that withdraws it.
 * @param {() => void} work
 */
export function inTurn(work) {
  waiting.add(work)
  if (!isTurn) setTimeout(next)
  isTurn = true
  return () => waiting.delete(work)
}

function next() {
  const [work] = waiting
  isTurn = work !== undefined
  if (!isTurn) return
  waiting.delete(work)
  afterFrame(next)
  work()
}

function afterFrame(then) {
  const end = () => {
    clearTimeout(timer)
    cancelAnimationFrame(frame)
    setTimeout(then)
  }
  const timer = setTimeout(end, FRAME_MAX_MS)
  const frame = requestAnimationFrame(end)
}
