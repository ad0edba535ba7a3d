"""Whether uPlot draws the line charts of a report better than the report's own script.

    npm pack uplot && tar xf uplot-*.tgz
    python -m benchmarks.chart_library package

The same report is written twice: as it is, and with its class for line charts replaced by one that
hands everything to uPlot: median, band, dashes, linear and logarithmic axes, target and zoom. It
has no values under the pointer, no circle where a curve ends, and no recipe stands out when the
pointer is on its name; uPlot leaves all of these to plugins. Prints the size of both pages, the
lines of our own script, and the time from navigation until everything is drawn, the best of five
in headless Chromium, which must be installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from benchmarks.report import CHROMIUM_ARGUMENTS, RECIPES, make_runs

from aqg.report.write import write_report

UPLOT_CHART = r"""
class LineChart {
  constructor(host, view, height = 300) {
    Object.assign(this, { host, view, height, zoom: null });
  }

  measure() { this.width = Math.max(200, this.host.clientWidth); }

  draw() {
    const { series, x, y } = this.view();
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const color = (text) => style.getPropertyValue(text.slice(4, -1)).trim();
    const tables = [], lines = [], bands = [];
    for (const one of series) { // every curve has an x of its own; a band takes two more
      const { curve } = one, stroke = color(one.color);
      const isShown = (a, b) => (!x.log || a > 0) && (!y.log || b > 0) && !Number.isNaN(b);
      const kept = [...curve.x.keys()].filter((i) => isShown(curve.x[i], curve.y[i]));
      if (!kept.length) continue;
      const names = curve.low ? ["x", "high", "low", "y"] : ["x", "y"];
      tables.push(names.map((name) => kept.map((i) => curve[name][i])));
      const shared = { spanGaps: true, points: { show: false } };
      if (curve.low) {
        bands.push({ series: [lines.length + 1, lines.length + 2], fill: `${stroke}29` });
        lines.push({ ...shared, stroke: "transparent" }, { ...shared, stroke: "transparent" });
      }
      const dash = DASHES[one.dash % DASHES.length].split(" ").map(Number);
      lines.push({ ...shared, stroke, dash, width: one.bare ? 1.2 : 2, label: one.label });
    }
    if (!tables.length) return;
    const axis = (of, size) => ({
      size, stroke: color("var(--muted)"), grid: { stroke: color("var(--grid)"), width: 1 },
      values: (u, all) => all.map((v) => v === null ? null : formatTick(v, of.format, of.log)),
    });
    this.plot = new uPlot({
      width: this.width, height: this.height, legend: { show: false }, bands,
      scales: { x: { time: false, distr: x.log ? 3 : 1 }, y: { distr: y.log ? 3 : 1 } },
      axes: [{ ...axis(x, 40), label: x.title }, axis(y, 60)],
      series: [{}, ...lines],
      hooks: { draw: [(u) => {
        if (!y.target) return;
        u.ctx.fillRect(u.bbox.left, u.valToPos(y.target, "y", true), u.bbox.width, 1);
      }] },
      cursor: { drag: { x: true, y: true } },
    }, uPlot.join(tables), this.host);
  }
}
"""


def with_uplot(page: str, folder: Path) -> str:
    """Return the page with uPlot in the place of its own class for line charts."""
    charts = resources.files("aqg.report").joinpath("charts.js").read_text()
    own = charts[charts.index("class LineChart") : charts.index("// The rectangle between")]
    library = (folder / "dist" / "uPlot.iife.min.js").read_text()
    style = (folder / "dist" / "uPlot.min.css").read_text()
    assert own in page
    page = page.replace(own, f"{library}\n{UPLOT_CHART}")
    return page.replace("</style>", f"{style}</style>", 1)


def num_lines(script: str) -> int:
    """Count lines that are neither empty nor a comment."""
    return len(re.findall(r"^(?!\s*(?://|$)).", script, re.M))


def seconds_to_draw(pages: dict[str, Path], chromium: str, times: int = 5) -> dict[str, float]:
    """Open the pages in turn; return the best time of each."""
    from playwright.sync_api import sync_playwright

    best = dict.fromkeys(pages, float("inf"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=list(CHROMIUM_ARGUMENTS)
        )
        for _ in range(times):
            for name, path in pages.items():
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                page.goto(path.resolve().as_uri())
                page.wait_for_function("document.documentElement.dataset.ready")
                ready = int(page.evaluate("document.documentElement.dataset.ready")) / 1000
                best[name] = min(best[name], ready)
                page.close()
        browser.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("uplot", type=Path, help="the unpacked npm package")
    parser.add_argument("--keep", type=Path, help="leave both pages in this directory")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("needs chromium on the path")
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        make_runs(Path(name) / "runs", RECIPES, 5, 1000, 10)
        pages = {"own": folder / "own.html", "uPlot": folder / "uplot.html"}
        write_report([Path(name) / "runs"], pages["own"])
        pages["uPlot"].write_text(with_uplot(pages["own"].read_text(), options.uplot))
        drawn = seconds_to_draw(pages, chromium)
        sizes = {key: path.stat().st_size for key, path in pages.items()}
    files = resources.files("aqg.report").iterdir()
    scripts = "\n".join(file.read_text() for file in files if file.name.endswith(".js"))
    start, end = scripts.index("class LineChart"), scripts.index("// The rectangle between")
    own_class = num_lines(scripts[start:end])
    lines = {"own": num_lines(scripts)}
    lines["uPlot"] = lines["own"] - own_class + num_lines(UPLOT_CHART)
    for key in pages:
        print(f"{key:6} {drawn[key]:.2f} s  {sizes[key] / 1e3:.0f} kB  {lines[key]} lines of ours")


if __name__ == "__main__":
    main()
