// Building blocks: elements, number formats, scales, the tooltip, and the line chart.

function element(name, attributes = {}, parent = null, text = null) {
  const isSvg = element.svgNames.has(name);
  const node = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
element.svgNames = new Set(
  ["svg", "g", "path", "line", "rect", "circle", "text", "clipPath", "defs"]);

// ---------------------------------------------------------------- numbers

function power(exponent) {
  return "10" + String(exponent).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
}

function inUnits(value, units) {
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Number(value.toPrecision(3))} ${units[units.length - 1][1]}`;
}

const FORMATS = {
  count: (v) => (v >= 100 || Number.isInteger(v)
    ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(3)))),
  bytes: (v) => inUnits(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]),
  percent: (v) => `${(100 * v).toFixed(1)}%`,
  loss: (v) => (Math.abs(v) < 1e5 ? v.toFixed(Math.abs(v) < 100 ? 6 : 1) : FORMATS.residual(v)),
  residual: (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5)
    ? v.toExponential(1).replace("e+", "e") : String(Number(v.toPrecision(2)))),
  number: (v) => String(Number(v.toPrecision(4))),
};

function formatTick(value, format, isLog) {
  const exponent = Math.log10(Math.abs(value));
  const isPower = Math.abs(exponent - Math.round(exponent)) < 1e-9;
  if (format === "percent") return `${Number((100 * value).toPrecision(4))}%`;
  if (format === "bytes") return FORMATS.bytes(value);
  if (isLog && isPower && (exponent < -1.5 || exponent > 5.5)) return power(Math.round(exponent));
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function tenths(place) { return Math.round(place * 10) / 10; }

// ---------------------------------------------------------------- scales

function makeScale(isLog, low, high, from, to) {
  const forward = isLog ? Math.log10 : (v) => v;
  const start = forward(low);
  const slope = (to - from) / (forward(high) - start || 1);
  return {
    isLog, low, high,
    at: (value) => from + (forward(value) - start) * slope,
    value: (place) => {
      const t = start + (place - from) / slope;
      return isLog ? 10 ** t : t;
    },
  };
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function makeTicks(scale, count) {
  if (!scale.isLog) return linearTicks(scale.low, scale.high, count);
  const first = Math.floor(Math.log10(scale.low)), last = Math.ceil(Math.log10(scale.high));
  const inside = (v) => v >= scale.low * (1 - 1e-9) && v <= scale.high * (1 + 1e-9);
  for (const mantissas of [[1], [1, 3], [1, 2, 5]]) {
    const ticks = [];
    for (let e = first; e <= last; e++) {
      for (const m of mantissas) if (inside(m * 10 ** e)) ticks.push(Number(`${m}e${e}`));
    }
    if (ticks.length > count) {
      const stride = Math.ceil(ticks.length / count);
      return ticks.filter((v, i) => i % stride === 0);
    }
    if (ticks.length >= 3) return ticks;
  }
  return linearTicks(scale.low, scale.high, count);
}

// ---------------------------------------------------------------- tooltip

const tooltip = {
  show(event, title, rows) {
    const box = document.getElementById("tooltip");
    box.replaceChildren();
    element("b", {}, box, title);
    for (const { color, label, value } of rows) {
      const row = element("div", {}, box);
      element("i", color ? { style: `--c: ${color}` } : { style: "--c: transparent" }, row);
      element("span", {}, row, label);
      element("em", {}, row, value);
    }
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = event.clientX + 18 + width > innerWidth ? event.clientX - 18 - width : event.clientX + 18;
    const top = Math.min(event.clientY + 14, innerHeight - height - 8);
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  },
  hide() { document.getElementById("tooltip").hidden = true; },
};

// ---------------------------------------------------------------- line chart

const DASHES = ["", "7 4", "2 4", "10 4 2 4", "14 5", "1 5 6 5", "4 3", "12 3 3 3 3 3"];
const MARGIN = { left: 56, right: 16, top: 8, bottom: 40 };
let chartNumber = 0;

function lastAtOrBefore(x, value) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// Curves with bands. `view()` tells what to draw now:
// { series: [{ label, group, color, dash, open, curve: { x, y, low, high } }],
//   x: { title, log, format }, y: { log, format, target } }.
class LineChart {
  constructor(host, view, height = 300) {
    Object.assign(this, { host, view, height, zoom: null, id: `chart-${chartNumber++}` });
  }

  // Apart from drawing: to measure after each change would lay out the page over and over.
  measure() { this.width = Math.max(200, this.host.clientWidth); }

  draw() {
    const { series, x, y } = this.view();
    const { width } = this;
    const svg = element("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height,
      class: "drag", role: "img", "aria-label": `${y.title} against ${x.title}` });
    this.host.replaceChildren(svg);
    this.box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top,
      bottom: this.height - MARGIN.bottom };
    const domain = this.zoom ?? this.fit(series, x, y);
    if (!domain) {
      element("text", { class: "empty", x: width / 2, y: this.height / 2 }, svg, "nothing to show");
      return;
    }
    const { left, right, top, bottom } = this.box;
    this.scales = { x: makeScale(x.log, ...domain.x, left, right),
      y: makeScale(y.log, ...domain.y, bottom, top) };
    drawAxes(svg, this.box, this.scales, x, y);
    const clip = element("clipPath", { id: this.id }, element("defs", {}, svg));
    element("rect", { x: left, y: top - 5, width: right - left + 6, height: bottom - top + 6 }, clip);
    const plot = element("g", { "clip-path": `url(#${this.id})` }, svg);
    if (y.target && y.target > domain.y[0] && y.target < domain.y[1]) {
      const place = this.scales.y.at(y.target);
      element("line", { class: "target", x1: left, x2: right, y1: place, y2: place }, plot);
      element("text", { x: left + 4, y: place - 5 }, plot, `target ${FORMATS.residual(y.target)}`);
    }
    for (const one of series) this.drawSeries(plot, one, x, y);
    this.listen(svg, series, x, y);
  }

  // The domain that shows every curve; a diverged one is cut off well above where it began.
  fit(series, x, y) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    let ceiling = 0;
    for (const { curve } of series) {
      let first = true;
      for (let i = 0; i < curve.x.length; i++) {
        const [a, b] = [curve.x[i], curve.y[i]];
        if ((x.log && !(a > 0)) || (y.log && !(b > 0)) || Number.isNaN(b)) continue;
        if (first) { ceiling = Math.max(ceiling, 20 * Math.abs(b)); first = false; }
        if (a < x0) x0 = a;
        if (a > x1) x1 = a;
        if (b < y0) y0 = b;
        if (b > y1) y1 = b;
      }
    }
    if (x0 > x1) return null;
    if (ceiling > 0 && !y.whole) y1 = Math.min(y1, ceiling);
    if (x0 === x1) x1 = x.log ? x0 * 10 : x0 + 1;
    if (!x.log && x0 < 0.2 * x1) x0 = 0;
    if (y.log) {
      y1 = Math.max(y1, y0 * 2);
      const pad = (y1 / y0) ** 0.05;
      [y0, y1] = [y0 / pad, y1 * pad];
    } else {
      const pad = 0.05 * (y1 - y0 || Math.abs(y1) || 1);
      [y0, y1] = [y0 >= 0 ? Math.max(0, y0 - pad) : y0 - pad, y1 + pad];
      if (y.format === "percent") y1 = Math.min(y1, 1.01);
    }
    return { x: [x0, x1], y: [y0, y1] };
  }

  drawSeries(plot, one, x, y) {
    const { curve } = one;
    const floor = this.scales.y.low;
    const px = (i) => tenths(this.scales.x.at(curve.x[i]));
    const py = (value) => tenths(this.scales.y.at(y.log && !(value > 0) ? floor / 10 : value));
    const kept = [];
    for (let i = 0; i < curve.x.length; i++) {
      if ((!x.log || curve.x[i] > 0) && !Number.isNaN(curve.y[i])) kept.push(i);
    }
    const group = element("g", { class: one.bare ? "series thin" : "series", "data-group": one.group, "data-recipe": one.recipe,
      style: `--c: ${one.color}` }, plot);
    if (!kept.length) return;
    const places = kept.map(px);
    const trace = (values) => kept.map((i, k) => `${places[k]} ${py(values[i])}`);
    if (curve.low) {
      const outline = trace(curve.high).concat(trace(curve.low).reverse());
      element("path", { class: "band", d: `M${outline.join("L")}Z` }, group);
    }
    element("path", { class: "line", d: `M${trace(curve.y).join("L")}`,
      "stroke-dasharray": DASHES[one.dash % DASHES.length] }, group);
    const last = kept[kept.length - 1];
    if (!one.bare) {
      element("circle", { class: one.open ? "end open" : "end", r: 4, cx: px(last),
        cy: py(curve.y[last]) }, group);
    }
  }

  listen(svg, series, x, y) {
    const { left, right, top, bottom } = this.box;
    const frame = element("rect", { class: "frame", x: left, y: top, width: right - left,
      height: bottom - top }, svg);
    const overlay = element("g", {}, svg);
    const place = (event) => {
      const box = svg.getBoundingClientRect();
      const clamp = (v, a, b) => Math.min(b, Math.max(a, v));
      return [clamp(event.clientX - box.left, left, right), clamp(event.clientY - box.top, top, bottom)];
    };
    let start = null;
    frame.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      start = place(event);
      frame.setPointerCapture(event.pointerId);
    });
    frame.addEventListener("pointermove", (event) => {
      const now = place(event);
      overlay.replaceChildren();
      if (start) {
        const [a, b] = selection(start, now, this.box);
        element("rect", { class: "selection", x: a[0], y: a[1], width: b[0] - a[0],
          height: b[1] - a[1] }, overlay);
        tooltip.hide();
      } else this.point(event, overlay, now, series, x, y);
    });
    frame.addEventListener("pointerup", (event) => {
      const begun = start;
      start = null;
      if (!begun) return;
      const [a, b] = selection(begun, place(event), this.box);
      if (b[0] - a[0] < 6) return;
      const { x: sx, y: sy } = this.scales;
      this.zoom = { x: [sx.value(a[0]), sx.value(b[0])], y: [sy.value(b[1]), sy.value(a[1])] };
      this.draw();
    });
    frame.addEventListener("pointerleave", () => { overlay.replaceChildren(); tooltip.hide(); });
    frame.addEventListener("dblclick", () => { this.zoom = null; this.draw(); });
  }

  point(event, overlay, [px, py], series, x, y) {
    const cost = this.scales.x.value(px);
    element("line", { class: "cross", x1: px, x2: px, y1: this.box.top, y2: this.box.bottom }, overlay);
    const rows = [];
    for (const one of series) {
      const i = lastAtOrBefore(one.curve.x, cost);
      if (i < 0 || Number.isNaN(one.curve.y[i])) continue;
      const value = one.curve.y[i];
      const height = this.scales.y.at(value);
      const write = FORMATS[y.format];
      const { low, high } = one.curve;
      const spread = low && high[i] > low[i] ? `  (${writeRange(low[i], high[i], write)})` : "";
      const isPast = cost > one.curve.x[one.curve.x.length - 1] * (1 + 1e-6);
      rows.push({ color: one.color, label: isPast ? `${one.label} (ended)` : one.label,
        value: write(value) + spread, height, far: Math.abs(height - py) });
      if (!isPast && height >= this.box.top && height <= this.box.bottom) {
        element("circle", { class: "spot", r: 4, cx: px, cy: height, style: `--c: ${one.color}` }, overlay);
      }
    }
    const nearest = rows.sort((a, b) => a.far - b.far).slice(0, 12);
    nearest.sort((a, b) => a.height - b.height);
    tooltip.show(event, `${x.title}: ${FORMATS[x.format](cost)}`, nearest);
  }
}

// The rectangle between two corners; a flat one spans the full height, to zoom along x only.
function selection(a, b, box) {
  const isFlat = Math.abs(a[1] - b[1]) < 12;
  return [
    [Math.min(a[0], b[0]), isFlat ? box.top : Math.min(a[1], b[1])],
    [Math.max(a[0], b[0]), isFlat ? box.bottom : Math.max(a[1], b[1])],
  ];
}

function drawAxes(svg, { left, right, top, bottom }, scales, x, y) {
  for (const value of makeTicks(scales.y, Math.max(3, (bottom - top) / 46))) {
    const place = scales.y.at(value);
    element("line", { class: "grid", x1: left, x2: right, y1: place, y2: place }, svg);
    element("text", { x: left - 8, y: place + 4, "text-anchor": "end" }, svg,
      formatTick(value, y.format, y.log));
  }
  for (const value of xTicks(scales.x, right - left, x.format ?? "count")) {
    const place = scales.x.at(value);
    element("line", { class: "grid", x1: place, x2: place, y1: top, y2: bottom }, svg);
    if (!x.bare) drawTickLabel(svg, place, bottom, formatTick(value, x.format, x.log));
  }
  element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }, svg);
  if (!x.bare) drawAxisTitle(svg, (left + right) / 2, bottom, x.title);
}

// Ticks that leave room for their labels; counts have whole ones only.
function xTicks(scale, width, format) {
  const ticks = makeTicks(scale, Math.max(3, width / 72));
  return format === "count" && !scale.isLog ? ticks.filter(Number.isInteger) : ticks;
}

function drawTickLabel(svg, x, bottom, text) {
  element("text", { x, y: bottom + 17, "text-anchor": "middle" }, svg, text);
}

function drawAxisTitle(svg, x, bottom, text) {
  element("text", { x, y: bottom + 34, "text-anchor": "middle" }, svg, text);
}
