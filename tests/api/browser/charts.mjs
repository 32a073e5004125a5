// The page's charts of known data, and what their pixels say was drawn. Evaluated in a page of the dashboard.
(async ({ candles, markers, levels, trade }) => {
  const folder = document.querySelector('script[type=module]').src.replace('app.js', '')
  const [{ timeChart }, { CandleChart }, { html, render }, { onGround }] = await Promise.all(
    ['charts', 'candles', 'lib', 'colors'].map(name => import(`${folder}${name}.js`)))
  const drawn = () => new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))
  const newHost = () => document.body.appendChild(Object.assign(document.createElement('div'), { style: 'width: 1000px' }))

  /** The canvases of an element as one picture, or what of it another one covers: the colour at a place, as #rrggbb. */
  function pictureOf(host, { left, top, width, height } = host.getBoundingClientRect()) {
    const context = Object.assign(document.createElement('canvas'), { width, height }).getContext('2d')
    for (const canvas of host.querySelectorAll('canvas')) {
      const at = canvas.getBoundingClientRect()
      context.drawImage(canvas, at.left - left, at.top - top, at.width, at.height)
    }
    const { data } = context.getImageData(0, 0, width, height)
    const at = (x, y) => `#${[0, 1, 2].map(part => data[4 * (Math.round(y) * Math.floor(width) + Math.round(x)) + part].toString(16).padStart(2, '0')).join('')}`
    return { at, width: Math.floor(width), height: Math.floor(height), element: { left, top } }
  }

  /** The longest vertical run of one of these colours in a column: {color, from, to}. */
  function longestRun({ at, height }, x, colors) {
    let longest = { length: 0 }
    for (let y = 0, from = 0; y < height; y += 1) {
      if (at(x, y) !== at(x, from)) from = y
      if (colors.includes(at(x, y)) && y - from + 1 > longest.length) longest = { color: at(x, y), from, to: y + 1, length: y - from + 1 }
    }
    return longest
  }

  /** The height in a column, between two others, at which the colour is nearest to this one: the edges of lines are smoothed. */
  function nearest({ at }, x, top, height, color) {
    const parts = text => [1, 3, 5].map(place => parseInt(text.slice(place, place + 2), 16))
    const wanted = parts(color)
    const distance = y => parts(at(x, y)).reduce((sum, part, place) => sum + Math.abs(part - wanted[place]), 0)
    return Array.from({ length: Math.floor(height) }, (_, y) => top + y).reduce((best, y) => (distance(y) < distance(best) ? y : best)) + 0.5
  }

  /** Candles from left to right: neighbouring columns with a run that is longer than a price line is thick. */
  function candlesIn(picture, colors) {
    const bodies = []
    let group = null
    for (let x = 0; x < picture.width; x += 1) {
      const run = longestRun(picture, x, colors)
      if (run.length <= 4) { group = null; continue }
      if (!group) bodies.push(group = [])
      group.push({ x, ...run })
    }
    return bodies.map(runs => {
      const wick = runs.reduce((one, other) => (other.length > one.length ? other : one))
      return { color: runs[1].color, x: [runs[0].x, runs.at(-1).x + 1], body: [runs[1].from, runs[1].to], wick: [wick.from, wick.to] }
    })
  }

  /** The box of all pixels of a colour. */
  function boxOf({ at, width, height }, color) {
    const places = []
    for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) if (at(x, y) === color) places.push([x, y])
    const [xs, ys] = [places.map(([x]) => x), places.map(([, y]) => y)]
    return places.length ? { x: [Math.min(...xs), Math.max(...xs) + 1], y: [Math.min(...ys), Math.max(...ys) + 1] } : null
  }

  const market = newHost()
  performance.clearMarks('candles')
  render(html`<${CandleChart} label="known" candles=${candles} markers=${markers} levels=${levels} running=${null} onPick=${() => {}} />`, market)
  while (!performance.getEntriesByName('candles').length) await drawn()
  await drawn()
  const pane = market.querySelector('canvas').getBoundingClientRect() // without the axes, whose labels have the colours of candles
  const picture = pictureOf(market, pane)
  const [gain, loss] = ['#07794f', '#bf2f12']
  const rows = Array.from({ length: picture.height }, (_, y) => y)
  const market_ = {
    candles: candlesIn(picture, [gain, loss]),
    markers: markers.map(marker => boxOf(picture, marker.color)),
    dashes: rows.filter(y => { let count = 0; for (let x = 0; x < picture.width; x += 1) count += picture.at(x, y) === loss; return count > picture.width / 4 }),
  }

  // A phone: the trade is in the middle of many more candles than fit, and its plan far beyond their prices.
  const phone = newHost()
  phone.style.width = '340px'
  performance.clearMarks('candles')
  render(html`<${CandleChart} label="trade" candles=${trade.candles} markers=${trade.markers} levels=${trade.levels} trade=${trade.time} />`, phone)
  while (!performance.getEntriesByName('candles').length) await drawn()
  await drawn()
  const place = phone.querySelector('canvas').getBoundingClientRect()
  const small = pictureOf(phone, place)
  const dashesIn = (picture, color) => Array.from({ length: picture.height }, (_, y) => y)
    .filter(y => { let count = 0; for (let x = 0; x < picture.width; x += 1) count += picture.at(x, y) === color; return count > picture.width / 4 })
  const alone = {
    width: small.width, height: small.height, markers: trade.markers.map(marker => boxOf(small, marker.color)), shade: boxOf(small, trade.shade),
    plan: [gain, loss].map(color => dashesIn(small, color).length),
  }
  const [, exit] = alone.markers
  const canvas = phone.querySelectorAll('canvas')[1] ?? phone.querySelector('canvas')
  canvas.dispatchEvent(new MouseEvent('mousemove', { clientX: place.left + (exit.x[0] + exit.x[1]) / 2, clientY: place.top + exit.y[0], bubbles: true }))
  canvas.dispatchEvent(new MouseEvent('mouseenter', { clientX: place.left + (exit.x[0] + exit.x[1]) / 2, clientY: place.top + exit.y[0] }))
  canvas.dispatchEvent(new MouseEvent('mousemove', { clientX: place.left + (exit.x[0] + exit.x[1]) / 2, clientY: place.top + exit.y[0], bubbles: true }))
  await drawn()
  alone.hint = phone.querySelector('.hint')?.innerText
  alone.ohlc = phone.querySelector('.ohlc').innerText
  document.documentElement.dataset.theme = 'dark'
  await drawn()
  await drawn()
  alone.dark = dashesIn(pictureOf(phone, place), '#ff7d61').length
  document.documentElement.dataset.theme = 'light'
  await drawn()

  const texts = []
  const labels = []
  const fillText = CanvasRenderingContext2D.prototype.fillText
  CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
    texts.push(text)
    const half = this.measureText(text).width / 2
    if (/^\d\d:00$|^\d+ Mar$/.test(text)) labels.push([x - half, this.canvas.clientWidth - x - half])
    return fillText.call(this, text, x, ...rest)
  }

  // Wherever the chart begins, no time is cut at its edges.
  for (let hours = 1; hours < 12; hours += 1) {
    const time = { ...trade.time, from: trade.time.from + hours * 3_600_000 }
    performance.clearMarks('candles')
    render(html`<${CandleChart} label="trade" candles=${trade.candles} markers=${trade.markers} levels=${trade.levels} trade=${time} />`, phone)
    while (!performance.getEntriesByName('candles').length) await drawn()
    await drawn()
  }
  alone.labels = labels.length
  alone.cut = Math.min(...labels.flat())

  // Five hundred marks on one candle are one mark with their number.
  const crowd = newHost()
  performance.clearMarks('candles')
  render(html`<${CandleChart} label="crowd" candles=${candles} markers=${Array.from({ length: 500 }, () => markers[0])} levels=${[]} />`, crowd)
  while (!performance.getEntriesByName('candles').length) await drawn()
  await drawn()
  alone.crowd = texts.filter(text => text === '500').length > 0
  CanvasRenderingContext2D.prototype.fillText = fillText

  const host = newHost()
  const series = [
    { name: 'Rising Star', color: '#336699', marks: [{ at: 60, value: 5, kind: 'gain', href: '#/positions' }] },
    { name: 'falling', color: '#996633' }]
  timeChart(host, [0, 60, 120], series, [[0, 5, 10], [10, 5, 0]], { height: 200, show: value => value.toFixed(1), ends: true })
  await drawn()
  const over = host.querySelector('.u-over')
  const plot = over.getBoundingClientRect()
  const curves = pictureOf(host)
  const [x, y] = [plot.left - curves.element.left, plot.top - curves.element.top]
  const lines = [0.25, 0.75].map(share => series.map(({ color }) => nearest(curves, x + share * plot.width, y, plot.height, onGround(color)) - y))
  const badges = series.map(({ color }) => {
    const ys = Array.from({ length: curves.height }, (_, at) => at).filter(at => curves.at(x + plot.width + 62, at) === onGround(color))
    return ys.length ? (ys[0] + ys.at(-1) + 1) / 2 - y : null
  })
  const press = (px, py) => {
    const at = { clientX: plot.left + px, clientY: plot.top + py, bubbles: true }
    for (const type of ['mousemove', 'mousedown', 'mouseup', 'click']) over.dispatchEvent(new MouseEvent(type, at))
    return [over.classList.contains('leads'), location.hash]
  }
  const dot = curves.at(x + plot.width / 2, y + plot.height / 2)
  return { alone, market: market_, lines, badges, height: plot.height, dot, presses: [press(5, 5), press(plot.width / 2, plot.height / 2)] }
})
