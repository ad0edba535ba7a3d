// Cost and delay: a point per recipe, whiskers over its runs, and the frontier that no other beats.

const LABEL_ROOM = 90;
const LETTER = 6.2; // its width on average, in pixels

// The place beside a point where a text covers as little as possible of what is there already.
function placeLabel(text, px, py, taken) {
  const width = LETTER * text.length;
  const places = [[px + 9, py + 4, "start", px + 9], [px - 9, py + 4, "end", px - 9 - width],
    [px, py - 9, "middle", px - width / 2], [px, py + 17, "middle", px - width / 2]];
  const options = places.map(([x, y, anchor, left]) => {
    const box = [left, y - 10, left + width, y + 2];
    const covered = taken.filter((b) => b[0] < box[2] && b[2] > box[0] && b[1] < box[3] && b[3] > box[1]);
    return { x, y, anchor, box, covered: covered.length };
  });
  const best = options.reduce((a, b) => (b.covered < a.covered ? b : a));
  taken.push(best.box);
  return best;
}

class FrontierChart {
  constructor(host, panel, isVisible) {
    Object.assign(this, { host, panel, isVisible, height: 340 });
  }

  measure() { this.width = Math.max(200, this.host.clientWidth); }

  draw() {
    const { width, height, panel } = this;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `${panel.y} against ${panel.x}` });
    this.host.replaceChildren(svg);
    const points = panel.points.filter((point) => this.isVisible(point));
    if (!points.length) {
      element("text", { class: "empty", x: width / 2, y: height / 2 }, svg, "nothing to show");
      return;
    }
    const box = { left: MARGIN.left, right: width - LABEL_ROOM, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const xs = points.map(({ x }) => x[0]).concat(panel.limit ? [1, panel.limit] : []);
    const ys = points.map(({ y }) => y[0]);
    this.scales = { x: this.scale(xs, box.left, box.right, 1.25), y: this.scale(ys, box.bottom, box.top, 1.6) };
    const x = { title: panel.x, log: true, format: "number" }, y = { log: true, format: "bytes" };
    drawAxes(svg, box, this.scales, x, y);
    if (panel.limit) {
      const place = this.scales.x.at(panel.limit);
      element("line", { class: "target", x1: place, x2: place, y1: box.top, y2: box.bottom }, svg);
      element("text", { x: place + 4, y: box.top + 10 }, svg, `${panel.limit}`);
    }
    element("path", { class: "frontier", d: this.outline(points, box) }, svg);
    const taken = points.map(({ x, y }) => [this.scales.x.at(x[0]), this.scales.y.at(y[0])])
      .map(([a, b]) => [a - 6, b - 6, a + 6, b + 6]);
    const marks = element("g", {}, svg), labels = element("g", {}, svg);
    for (const point of points) this.drawPoint(marks, labels, point, box, taken);
  }

  scale(values, from, to, room) {
    return makeScale(true, Math.min(...values) / room, Math.max(...values) * room, from, to);
  }

  // The step line under which no point lies.
  outline(points, box) {
    const { x, y } = this.scales;
    const best = [];
    for (const point of [...points].sort((a, b) => a.x[0] - b.x[0] || a.y[0] - b.y[0])) {
      if (!best.length || point.y[0] < best[best.length - 1].y[0]) best.push(point);
    }
    const steps = best.map((point, i) => `${i ? "H" : "M"}${tenths(x.at(point.x[0]))}${i ? "V" : " "}${tenths(y.at(point.y[0]))}`);
    return `${steps.join("")}H${box.right}`;
  }

  drawPoint(marks, labels, point, box, taken) {
    const inside = (v, a, b) => tenths(Math.min(b, Math.max(a, v)));
    const across = (v) => inside(this.scales.x.at(v), box.left, box.right);
    const down = (v) => inside(this.scales.y.at(v), box.top, box.bottom);
    const [px, py] = [across(point.x[0]), down(point.y[0])];
    const about = { class: "point series", "data-group": point.group ?? "", style: `--c: var(--c${point.color})` };
    const group = element("g", about, marks), label = element("g", about, labels);
    element("path", { class: "whisker", d: `M${across(point.x[1])} ${py}H${across(point.x[2])}M${px} ${down(point.y[1])}V${down(point.y[2])}` }, group);
    element("circle", { class: point.open ? "end open" : "end", r: 5.5, cx: px, cy: py }, group);
    const { x, y, anchor } = placeLabel(point.label, px, py, taken);
    element("text", { x, y, "text-anchor": anchor }, label, point.label);
    for (const part of [group, label]) {
      part.addEventListener("pointermove", (event) => tooltip.show(event, point.label, this.about(point)));
      part.addEventListener("pointerleave", () => tooltip.hide());
    }
  }

  about(point) {
    const rows = [[this.panel.x, point.x, FORMATS.number], [this.panel.y, point.y, FORMATS.bytes]].map(
      ([label, [middle, low, high], write]) => ({ label,
        value: write(middle) + (high > low ? `  (${writeRange(low, high, write)})` : "") }));
    if (point.open) rows.push({ label: "not every run gets there", value: "" });
    return rows;
  }
}
