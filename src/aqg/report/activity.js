// One run, looked at closely: uploads by width over time, and what every client did.

const ramp = {
  // Colors from few bits to many, read from the style so that they follow the theme.
  refresh() {
    const style = getComputedStyle(document.documentElement);
    this.stops = style.getPropertyValue("--ramp").split(",").map((hex) => {
      const n = parseInt(hex.trim().slice(1), 16);
      return [n >> 16, (n >> 8) & 255, n & 255];
    });
    this.away = style.getPropertyValue("--away").trim();
    this.surface = style.getPropertyValue("--surface").trim();
    this.known = new Map();
    this.silent = style.getPropertyValue("--silent").trim();
  },
  at(t) {
    const place = Math.min(1, Math.max(0, t)) * (this.stops.length - 1);
    const i = Math.min(this.stops.length - 2, Math.floor(place));
    const [a, b] = [this.stops[i], this.stops[i + 1]];
    return a.map((v, k) => Math.round(v + (b[k] - v) * (place - i)));
  },
};

// Where a number of bits lies among the widths of the report, from 0 to 1: evenly by rank.
function widthRank(bits, widths) {
  if (widths.length < 2) return 0.6;
  const i = Math.max(0, lastAtOrBefore(widths, bits));
  const next = widths[i + 1];
  const part = next === undefined ? 0 : (bits - widths[i]) / (next - widths[i]);
  return (i + Math.max(0, part)) / (widths.length - 1);
}

function widthColor(bits, widths) {
  if (!ramp.known.has(bits)) ramp.known.set(bits, `rgb(${ramp.at(widthRank(bits, widths)).join(" ")})`);
  return ramp.known.get(bits);
}

function roundsText(run, from, to) {
  const [a, b] = [run.first + from, run.first + to - 1];
  return a === b ? `round ${FORMATS.count(a)}` : `rounds ${FORMATS.count(a)}–${FORMATS.count(b)}`;
}

function clientsText(edges, i, ofSeveral = "") {
  return edges[i + 1] - edges[i] > 1 ? `clients ${edges[i]}–${edges[i + 1] - 1}${ofSeveral}` : `client ${edges[i]}`;
}

// `run()` tells which run to draw; `widths` are all widths of the report.
class ActivityChart {
  constructor(stackHost, heatHost, byteHosts, run, widths) {
    Object.assign(this, { stackHost, heatHost, byteHosts, run, widths });
  }

  measure() { this.width = Math.max(200, this.stackHost.clientWidth); }

  draw() {
    this.drawStack();
    this.drawHeat();
    this.drawBytes(this.byteHosts[0], "upload", "uploaded by each client, all rounds");
    this.drawBytes(this.byteHosts[1], "download", "downloaded by each client, all rounds");
  }

  frame(host, height, bottomMargin, title) {
    const { width } = this;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": title });
    host.replaceChildren(svg);
    const box = { left: MARGIN.left, right: width - MARGIN.right, top: 24, bottom: height - bottomMargin };
    element("text", { x: box.left, y: 14 }, svg, title);
    return { svg, box };
  }

  drawStack() {
    const run = this.run();
    const { svg, box } = this.frame(this.stackHost, 176, 10, "uploads per round");
    const { edges, widths, counts } = run.histogram;
    const num = edges.length - 1;
    if (num < 1) return;
    const total = new Float64Array(num);
    for (let i = 0; i < counts.length; i++) total[i % num] += counts[i] / (edges[i % num + 1] - edges[i % num]);
    const scales = {
      x: makeScale(false, run.first, run.first + edges[num], box.left, box.right),
      y: makeScale(false, 0, (Math.max(...total) || 1) * 1.06, box.bottom, box.top),
    };
    drawAxes(svg, box, scales, { bare: true }, { format: "count" });
    const base = new Float64Array(num);
    widths.forEach((width, row) => {
      const upper = [], lower = [];
      for (let i = 0; i < num; i++) {
        const [a, b] = [edges[i], edges[i + 1]].map((edge) => tenths(scales.x.at(run.first + edge)));
        const under = tenths(scales.y.at(base[i]));
        base[i] += counts[row * num + i] / (edges[i + 1] - edges[i]);
        const over = tenths(scales.y.at(base[i]));
        lower.push(`${a} ${under}`, `${b} ${under}`);
        upper.push(`${a} ${over}`, `${b} ${over}`);
      }
      element("path", { class: "stack", "data-width": width, fill: widthColor(width, this.widths),
        d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` }, svg);
    });
    this.hover(svg, box, (event, x) => {
      const bin = Math.min(num - 1, Math.max(0, lastAtOrBefore(edges, scales.x.value(x) - run.first)));
      const rows = widths.map((width, row) => ({ color: widthColor(width, this.widths),
        label: width === 1 ? "1 bit" : `${width} bits`, value: FORMATS.count(counts[row * num + bin]) }));
      tooltip.show(event, `${roundsText(run, edges[bin], edges[bin + 1])}: uploads`,
        rows.filter((row) => row.value !== "0").reverse());
    });
  }

  drawHeat() {
    const run = this.run();
    const { edges, clients, uploads, bits, away } = run.activity;
    const [columns, rows] = [edges.length - 1, clients.length - 1];
    const height = Math.min(420, Math.max(110, rows * 22)) + 24 + MARGIN.bottom;
    const { svg, box } = this.frame(this.heatHost, height, MARGIN.bottom, "clients");
    if (columns < 1 || rows < 1) {
      element("text", { class: "empty", x: (box.left + box.right) / 2, y: height / 2 }, svg,
        columns < 1 ? "no rounds yet" : "no clients on record");
      return;
    }
    const scale = makeScale(false, run.first, run.first + edges[columns], box.left, box.right);
    this.axes(svg, box, scale, clients);
    const canvas = element("canvas");
    const ratio = Math.max(1, devicePixelRatio || 1);
    const [w, h] = [box.right - box.left, box.bottom - box.top];
    Object.assign(canvas, { width: Math.round(w * ratio), height: Math.round(h * ratio) });
    Object.assign(canvas.style, { left: `${box.left}px`, top: `${box.top}px`, width: `${w}px`, height: `${h}px` });
    this.heatHost.prepend(canvas);
    this.paint(canvas, run, columns, rows);
    for (const [round, client] of run.faults) {
      const row = lastAtOrBefore(clients, client);
      if (row < 0 || row >= rows) continue;
      const [x, y] = [scale.at(round + 0.5), box.top + (row + 0.5) * h / rows];
      element("path", { class: "fault", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` }, svg);
    }
    this.hover(svg, box, (event, x, y) => {
      const column = Math.min(columns - 1, Math.max(0, lastAtOrBefore(edges, scale.value(x) - run.first)));
      const row = Math.min(rows - 1, Math.max(0, Math.floor((y - box.top) * rows / h)));
      const i = row * columns + column;
      const who = clientsText(clients, row);
      const lines = [{ label: "uploads", value: FORMATS.count(uploads[i]) }];
      if (uploads[i]) lines.push({ label: "bits per parameter, each", value: FORMATS.number(bits[i] / uploads[i]) });
      if (away[i]) lines.push({ color: ramp.away, label: "rounds dropped out", value: FORMATS.count(away[i]) });
      tooltip.show(event, `${who}, ${roundsText(run, edges[column], edges[column + 1])}`, lines);
    });
  }

  // A bar per client; where there are very many, per row of the picture above: the mean of its clients.
  drawBytes(host, direction, title) {
    const run = this.run();
    const isLast = direction === "download";
    const values = run.clients[direction];
    const edges = run.activity.clients;
    if (!values || !values.length) {
      const { svg, box } = this.frame(host, 52, 0, title);
      element("text", { class: "empty", x: (box.left + box.right) / 2, y: 38 }, svg,
        run.finished ? "unknown" : "known once the run is finished");
      return;
    }
    const { svg, box } = this.frame(host, isLast ? 150 : 118, isLast ? MARGIN.bottom : 10, title);
    const num = values.length;
    const scales = {
      x: makeScale(false, 0, edges[num], box.left, box.right),
      y: makeScale(false, 0, (Math.max(...values) || 1) * 1.06, box.bottom, box.top),
    };
    drawAxes(svg, box, scales, { bare: true }, { format: "bytes" });
    const gap = (box.right - box.left) / num > 6 ? 1 : 0;
    for (let i = 0; i < num; i++) {
      const [left, right, top] = [scales.x.at(edges[i]), scales.x.at(edges[i + 1]), scales.y.at(values[i])];
      element("rect", { class: `bar ${direction}`, x: tenths(left + gap), y: tenths(top),
        width: tenths(Math.max(0.5, right - left - 2 * gap)), height: tenths(box.bottom - top) }, svg);
    }
    if (isLast) {
      const stride = Math.ceil(num / Math.max(2, Math.floor((box.right - box.left) / 36)));
      for (let i = 0; i < num; i += stride) {
        drawTickLabel(svg, scales.x.at((edges[i] + edges[i + 1]) / 2), box.bottom, String(edges[i]));
      }
      drawAxisTitle(svg, (box.left + box.right) / 2, box.bottom, "client");
    }
    this.hover(svg, box, (event, x) => {
      const i = Math.min(num - 1, Math.max(0, lastAtOrBefore(edges, scales.x.value(x))));
      const { upload, download } = run.clients;
      const lines = [["uploaded", upload], ["downloaded", download]].filter(([, sizes]) => sizes)
        .map(([label, sizes]) => ({ label, value: FORMATS.bytes(sizes[i]) }));
      if (upload && download) lines.push({ label: "total", value: FORMATS.bytes(upload[i] + download[i]) });
      tooltip.show(event, clientsText(edges, i, ", each"), lines);
    });
  }

  axes(svg, box, scale, clients) {
    for (const value of xTicks(scale, box.right - box.left, "count")) {
      drawTickLabel(svg, scale.at(value), box.bottom, formatTick(value, "count", false));
    }
    drawAxisTitle(svg, (box.left + box.right) / 2, box.bottom, "round");
    const rows = clients.length - 1;
    const stride = Math.ceil(rows / 20);
    for (let row = 0; row < rows; row += stride) {
      const y = box.top + (row + 0.5) * (box.bottom - box.top) / rows;
      element("text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, svg, String(clients[row]));
    }
  }

  // Color: bits per upload. Strength: how often the client uploaded. Where there is room, a strip
  // below each row tells how often it had dropped out; a cell with nothing else is filled.
  paint(canvas, run, columns, rows) {
    const { edges, clients, uploads, bits, away } = run.activity;
    const context = canvas.getContext("2d");
    context.fillStyle = ramp.silent;
    context.fillRect(0, 0, canvas.width, canvas.height);
    const rowHeight = canvas.height / rows;
    const hasAway = away.some((n) => n > 0);
    const gap = rowHeight > 8 ? Math.max(1, Math.round(rowHeight * 0.1)) : 0;
    const strip = hasAway && rowHeight > 10 ? Math.round(rowHeight * 0.2) : 0;
    const lefts = Array.from(edges, (edge) => Math.round(edge * canvas.width / edges[columns]));
    for (let row = 0; row < rows; row++) {
      const top = Math.round(row * rowHeight), bottom = Math.round((row + 1) * rowHeight);
      for (let column = 0; column < columns; column++) {
        const i = row * columns + column;
        const chances = (edges[column + 1] - edges[column]) * (clients[row + 1] - clients[row]);
        const [x, width] = [lefts[column], Math.max(1, lefts[column + 1] - lefts[column])];
        const isAway = away[i] === chances || (!strip && away[i] > uploads[i] && away[i] * 2 > chances);
        if (uploads[i] && !isAway) {
          context.globalAlpha = Math.max(0.22, Math.sqrt(uploads[i] / Math.max(1, chances - away[i])));
          context.fillStyle = widthColor(bits[i] / uploads[i], this.widths);
          context.fillRect(x, top, width, bottom - top - strip);
        }
        if (away[i] && (strip || isAway)) {
          context.globalAlpha = isAway ? 1 : Math.sqrt(away[i] / chances);
          context.fillStyle = ramp.away;
          const y = isAway ? top : bottom - strip - gap;
          context.fillRect(x, y, width, bottom - y);
        }
      }
      context.globalAlpha = 1;
      context.fillStyle = ramp.surface;
      if (gap) context.fillRect(0, bottom - gap, canvas.width, gap);
    }
  }

  hover(svg, box, show) {
    const frame = element("rect", { class: "frame", x: box.left, y: box.top, width: box.right - box.left,
      height: box.bottom - box.top }, svg);
    frame.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect();
      show(event, event.clientX - place.left, event.clientY - place.top);
    });
    frame.addEventListener("pointerleave", () => tooltip.hide());
  }
}
