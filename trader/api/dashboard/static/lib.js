// @ts-check
// Preact and htm, as the other modules use them.
export { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo } from './vendor/preact-htm.js'
