// Runs the adapter of docs/frontends.md, whose text comes with the answers to adapt: {adapter, answers}, each by its function.
import { readFileSync } from 'node:fs'

const { adapter, answers } = JSON.parse(readFileSync(0, 'utf8'))
const functions = await import(`data:text/javascript,${encodeURIComponent(adapter)}`)
console.log(JSON.stringify(Object.fromEntries(Object.entries(answers).map(([name, inputs]) => [name, functions[name](...inputs)]))))
