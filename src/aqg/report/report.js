// The page: builds tables and plots from the data, and keeps them in step with the toolbar.

const AXES = {
  rounds: { title: "rounds", format: "count" },
  uploads: { title: "uploads", format: "count" },
  bytes: { title: "bytes", format: "bytes" },
};
const BYTES = { total_bytes: "bytes uploaded and downloaded", upload_bytes: "bytes uploaded" };

class Report {
  constructor(data) {
    this.data = data;
    this.hiddenRecipes = new Set();
    this.hiddenValues = data.telling.map(() => new Set());
    const hasResiduals = data.groups.every((group) => group.curves.residual.rounds);
    this.view = { metric: hasResiduals ? "residual" : "loss", rounds: "linear", costs: "log", losses: "log", hasResiduals };
    this.view.bytes = "total_bytes";
    this.hasTotals = data.groups.some((group) => group.curves.loss.total_bytes);
    this.byteCaptions = [];
    this.charts = [];
    this.columns = [];
  }

  build() {
    const { data } = this;
    ramp.refresh();
    const facts = document.getElementById("facts");
    for (const fact of data.facts) element("span", {}, facts, fact);
    const headline = document.getElementById("headline");
    headline.textContent = data.headline ?? "";
    headline.hidden = !data.headline;
    document.getElementById("created").textContent = `Made on ${data.created} by aqg report.`;
    this.buildLegend();
    this.buildControls();
    this.buildMetricSections();
    this.buildResults();
    this.buildFrontiers();
    this.buildCurves();
    this.buildActivity();
    this.buildIncidents();
    this.buildSettings();
    if (!data.groups.length) { // only results of a study, without its runs
      for (const name of ["toolbar", "results", "losses", "activity", "settings"]) document.getElementById(name).hidden = true;
    }
  }

  isVisible(group) {
    return !this.hiddenRecipes.has(group.recipe)
      && group.settings.every((value, i) => !this.hiddenValues[i].has(value));
  }

  color(group) { return `var(--c${group.color})`; }

  // ------------------------------------------------------------ toolbar

  buildLegend() {
    const legend = document.getElementById("legend");
    this.data.recipes.forEach((recipe, index) => {
      const chip = element("button", { class: recipe.again ? "chip again" : "chip", type: "button", "data-recipe": index,
        style: `--c: var(--c${recipe.color})`, "aria-pressed": "true",
        title: "Click: show or hide. Double-click: show only this." }, legend);
      element("span", { class: "dot" }, chip);
      element("span", {}, chip, recipe.name);
      const all = this.data.recipes.map((_, i) => i);
      this.makeToggle(chip, index, all, this.hiddenRecipes);
      chip.addEventListener("pointerenter", () => this.focus((group) => group.recipe === index));
      chip.addEventListener("pointerleave", () => this.focus(null));
    });
    this.data.telling.forEach((name, i) => {
      element("span", { class: "about" }, legend, name.replaceAll("_", " "));
      const values = [...new Set(this.data.groups.map((group) => group.settings[i]))];
      for (const value of values) {
        const chip = element("button", { class: "chip value", type: "button", "aria-pressed": "true",
          title: "Click: show or hide. Double-click: show only this." }, legend, value);
        this.makeToggle(chip, value, values, this.hiddenValues[i]);
        chip.addEventListener("pointerenter", () => this.focus((group) => group.settings[i] === value));
        chip.addEventListener("pointerleave", () => this.focus(null));
      }
    });
  }

  makeToggle(chip, item, all, hidden) {
    (hidden.chips ??= []).push([chip, item]);
    const show = () => {
      for (const [other, key] of hidden.chips) other.setAttribute("aria-pressed", String(!hidden.has(key)));
      this.update();
    };
    let before = new Set();
    chip.addEventListener("click", (event) => {
      if (event.detail > 1) return;
      before = new Set(hidden);
      if (!hidden.delete(item)) hidden.add(item);
      show();
    });
    chip.addEventListener("dblclick", () => { // comes after the click, which it replaces
      const wasAlone = !before.has(item) && before.size === all.length - 1;
      hidden.clear();
      if (!wasAlone) for (const other of all) if (other !== item) hidden.add(other);
      show();
    });
  }

  // Let the curves that match stand out, unless none of them is there.
  focus(matches) {
    const curves = [...document.querySelectorAll(".series")];
    const chosen = matches ? curves.filter((node) => node.dataset.group !== "" && matches(this.data.groups[node.dataset.group])) : [];
    document.body.classList.toggle("focusing", chosen.length > 0);
    for (const node of curves) node.classList.toggle("focus", chosen.includes(node));
  }

  buildControls() {
    const controls = document.getElementById("controls");
    const scales = { linear: "linear", log: "log" };
    const choices = [["losses", "loss", scales], ["rounds", "rounds", scales], ["costs", "uploads, bytes", scales]];
    if (this.hasTotals) choices.push(["bytes", "bytes", { total_bytes: "up and down", upload_bytes: "up" }]);
    if (this.view.hasResiduals) {
      choices.unshift(["metric", "", { residual: "loss − minimum", loss: "loss" }]);
    }
    for (const [key, about, options] of choices) {
      const box = element("div", { class: "segments", role: "group", "data-control": key }, controls);
      if (about) element("span", { class: "about" }, box, about);
      for (const [value, text] of Object.entries(options)) {
        const button = element("button", { type: "button", "data-value": value,
          "aria-pressed": String(this.view[key] === value) }, box, text);
        button.addEventListener("click", () => {
          this.view[key] = value;
          for (const other of box.querySelectorAll("button")) {
            other.setAttribute("aria-pressed", String(other === button));
          }
          for (const chart of this.charts) chart.zoom = null;
          this.update();
        });
      }
    }
  }

  // ------------------------------------------------------------ results

  buildResults() {
    const { groups, telling } = this.data;
    const hasSeeds = groups.some((group) => group.runs.length > 1);
    document.getElementById("results-note").textContent = hasSeeds
      ? "Medians over seeds, with the smallest and the largest value below. Click a heading to sort."
      : "Click a heading to sort.";
    const bands = hasSeeds ? "Lines are medians over seeds, bands reach from the smallest to the largest value." : "";
    for (const node of document.querySelectorAll(".band-note")) node.textContent = bands;
    const number = (key, title, format) => ({ title, sort: (g) => g.results[key]?.[0] ?? null,
      cell: (td, g) => writeSpread(td, g.results[key], format, g, key) });
    const text = (title, get) => ({ title, isText: true, sort: get, cell: (td, g) => { td.textContent = get(g); } });
    const columns = [
      { title: "recipe", isText: true, sort: (g) => this.data.recipes[g.recipe].name,
        cell: (td, g) => this.writeName(td, g) },
      ...["dataset", "partition"].map((name) => text(name, (g) => g[name])),
      ...telling.map((name, i) => [name, i]).filter(([name]) => !["dataset", "partition", "rounds"].includes(name))
        .map(([name, i]) => text(name.replaceAll("_", " "), (g) => g.settings[i])),
      number("rounds", "rounds", "count"),
      number("uploads", "uploads", "count"),
      number("bits_per_param", "bits/param", "count"),
      number("upload_bytes", "uploaded", "bytes"),
      number("download_bytes", "downloaded", "bytes"),
      number("total_bytes", "total", "bytes"),
      number("target_total_bytes", "total to target", "bytes"),
      number("target_upload_bytes", "uploaded to target", "bytes"),
      number("final_loss", "final loss", "loss"),
      number("residual", "loss − minimum", "residual"),
      ...this.data.metrics.map((metric) => number(metric.key, metric.name, metric.format)),
      number("faults", "faults", "count"),
    ];
    const isKnown = { downloaded: (g) => g.results.download_bytes, total: (g) => g.results.total_bytes,
      "total to target": (g) => g.target !== null && g.results.total_bytes,
      "uploaded to target": (g) => g.target !== null && !g.results.total_bytes, "loss − minimum": (g) => g.results.residual,
      faults: (g) => g.results.faults?.[2] > 0,
      ...Object.fromEntries(this.data.metrics.map(({ key, name }) => [name, (g) => g.results[key]])) };
    const shown = columns.filter(({ title }) => !(title in isKnown) || groups.some(isKnown[title]));
    this.rows = makeTable(document.getElementById("results-table"), shown, groups);
  }

  writeName(td, group) {
    const svg = element("svg", { class: "sample", viewBox: "0 0 26 8" }, td);
    element("path", { class: "line", d: "M1 4H25", style: `--c: ${this.color(group)}; stroke-width: 3`,
      "stroke-dasharray": DASHES[group.dash % DASHES.length] }, svg);
    td.append(this.data.recipes[group.recipe].name);
    if (group.runs.length > 1) element("span", { class: "spread" }, td, `${group.runs.length} seeds`);
    if (group.state) element("div", { class: "state" }, td, group.state);
  }

  // ------------------------------------------------------------ plots

  buildFrontiers() {
    const { frontiers, groups } = this.data;
    document.getElementById("frontier").hidden = !frontiers.length;
    if (frontiers.some(({ limit }) => limit)) {
      document.getElementById("frontier-note").textContent =
        "What lies left of the dotted line can take the place of federated averaging.";
    }
    for (const panel of frontiers) {
      const figure = element("figure", {}, document.getElementById("frontier-panels"));
      const caption = element("figcaption", {}, figure, panel.title ? `${panel.title}: ${panel.goal}` : `until the ${panel.goal}`);
      const host = element("div", { class: "plot frontier-plot" }, figure);
      if (panel.never.length) element("p", { class: "note" }, figure, `Not reached: ${panel.never.join(", ")}.`);
      this.charts.push(new FrontierChart(host, panel,
        (point) => point.group === null || this.isVisible(groups[point.group])));
      caption.title = panel.goal;
    }
  }

  buildCurves() {
    for (const panels of document.querySelectorAll(".panels")) {
      const measured = this.data.metrics.find(({ key }) => key === panels.dataset.metric);
      for (const [axis, x] of Object.entries(AXES)) {
        const figure = element("figure", {}, panels);
        const caption = element("figcaption", {}, figure, `against ${x.title}`);
        if (axis === "bytes") this.byteCaptions.push(caption);
        const host = element("div", { class: "plot", "data-axis": axis }, figure);
        this.charts.push(new LineChart(host, () => {
          const metric = measured ? measured.key : this.view.metric;
          return {
            series: this.series((group) => group.curves[metric][axis === "bytes" ? this.view.bytes : axis]),
            x: { ...x, title: axis === "bytes" ? BYTES[this.view.bytes] : x.title, log: this.view[axis === "rounds" ? "rounds" : "costs"] === "log" },
            y: measured
              ? { title: measured.title, format: measured.format, log: false }
              : { title: "loss", format: metric, log: this.view.losses === "log",
                  target: metric === "residual" ? this.data.target : null },
          };
        }));
      }
    }
  }

  // One section for each metric that some run has.
  buildMetricSections() {
    const template = document.getElementById("metric");
    for (const metric of this.data.metrics) {
      if (!this.data.groups.some((group) => group.curves[metric.key].rounds)) continue;
      const section = template.content.firstElementChild.cloneNode(true);
      section.id = metric.key;
      section.querySelector("h2").textContent = metric.title[0].toUpperCase() + metric.title.slice(1);
      section.querySelector(".better").textContent = metric.better ? `${metric.better[0].toUpperCase()}${metric.better.slice(1)} is better.` : "";
      section.querySelector(".panels").dataset.metric = metric.key;
      template.before(section);
    }
  }

  series(curveOf, bare = false) {
    return this.data.groups
      .map((group, index) => ({ group: index, recipe: group.recipe, label: group.label, dash: group.dash,
        color: this.color(group), open: !group.finished, bare, curve: curveOf(group) }))
      .filter((one) => one.curve && this.isVisible(this.data.groups[one.group]));
  }

  buildActivity() {
    const { runs } = this.data;
    const host = document.getElementById("activity-columns");
    for (const first of this.mostVaried()) {
      const column = { index: first };
      const figure = element("figure", {}, host);
      const caption = element("figcaption", {}, figure);
      column.select = element("select", { "aria-label": "run" }, caption);
      column.aside = element("span", { class: "aside" }, caption);
      const stack = element("div", { class: "plot stack-plot" }, figure);
      const heat = element("div", { class: "plot heat-plot" }, figure);
      const bytes = ["upload", "download"].map((direction) =>
        element("div", { class: "plot bytes-plot", "data-direction": direction }, figure));
      column.chart = new ActivityChart(stack, heat, bytes, () => runs[column.index], this.data.widths);
      column.select.addEventListener("change", () => {
        column.index = Number(column.select.value);
        this.drawColumn(column);
      });
      this.columns.push(column);
    }
  }

  // Two runs to begin with: of different recipes if possible, with as much to see as there is.
  mostVaried() {
    const { runs, groups } = this.data;
    const score = (i) => runs[i].histogram.widths.length + (runs[i].activity.away.some((n) => n > 0) ? 0.5 : 0);
    const uploads = (i) => runs[i].activity.uploads.reduce((a, b) => a + b, 0);
    const order = runs.map((_, i) => i).sort((a, b) => score(b) - score(a) || uploads(a) - uploads(b));
    const recipe = (i) => groups[runs[i].group].recipe;
    const second = order.find((i) => recipe(i) !== recipe(order[0])) ?? order[1];
    return [order[0], second].filter((i) => i !== undefined);
  }

  runLabel(run) {
    const group = this.data.groups[run.group];
    return group.runs.length > 1 ? `${group.label} · seed ${run.seed}` : group.label;
  }

  // Offer the runs that are visible; a column whose run was hidden moves on to another.
  updateColumns() {
    const { runs, groups } = this.data;
    const visible = runs.map((_, i) => i).filter((i) => isVisibleRun(this, runs[i]));
    const taken = new Set(this.columns.map((column) => column.index));
    for (const column of this.columns) {
      const figure = column.select.closest("figure");
      figure.hidden = !visible.length;
      if (!visible.length) continue;
      if (!visible.includes(column.index)) {
        column.index = visible.find((i) => !taken.has(i) && groups[runs[i].group].runs[0] === i) ?? visible[0];
        taken.add(column.index);
      }
      column.select.replaceChildren();
      for (const i of visible) element("option", { value: i }, column.select, this.runLabel(runs[i]));
      column.select.value = String(column.index);
    }
  }

  drawColumn(column) {
    const run = this.data.runs[column.index];
    const total = run.activity.uploads.reduce((a, b) => a + b, 0);
    column.aside.textContent = `${FORMATS.count(total)} uploads`;
    column.select.closest("figure").dataset.recipe = this.data.groups[run.group].recipe;
    column.chart.draw();
  }

  drawSwatches() {
    const legend = document.getElementById("activity-legend");
    legend.replaceChildren();
    const add = (color, text, framed) => {
      const item = element("span", {}, legend);
      element("i", { style: `--c: ${color}`, class: framed ? "framed" : "" }, item);
      item.append(text);
    };
    for (const width of this.data.widths) add(widthColor(width, this.data.widths), width === 1 ? "1 bit" : `${width} bits`);
    add(ramp.silent, "skipped", true);
    if (this.data.runs.some((run) => run.activity.away.some((n) => n > 0))) add(ramp.away, "dropped out");
  }

  // ------------------------------------------------------------ incidents, settings

  buildIncidents() {
    const { extras, never, faults, runs } = this.data;
    const section = document.getElementById("incidents");
    section.hidden = !extras.length && !faults.length;
    if (section.hidden) return;
    const notes = [];
    if (faults.length) notes.push("Faults are marked with a cross in the pictures of single runs above.");
    if (extras.length) {
      notes.push("What else the rounds have on record is drawn round by round; the table has totals of counts and means of other numbers.");
    }
    if (never.length) notes.push(`Zero throughout: ${never.join(", ").replaceAll("_", " ")}.`);
    document.getElementById("incidents-note").textContent = notes.join(" ");
    if (extras.length) {
      this.buildExtras(document.getElementById("incidents-plot"));
      const name = (run) => this.runLabel(run);
      const columns = [{ title: "run", isText: true, sort: name, cell: (td, run) => { td.textContent = name(run); } }];
      for (const key of extras) {
        columns.push({ title: key.replaceAll("_", " "),
          sort: (run) => run.extras[key]?.total ?? run.extras[key]?.mean ?? null,
          cell: (td, run) => writeTotal(td, run.extras[key]) });
      }
      const table = document.getElementById("extras-table");
      makeTable(table, columns, runs);
      table.parentElement.hidden = false;
    }
    if (faults.length) {
      const table = document.getElementById("faults-table");
      const text = (title, get, isWide) => ({ title, isText: true, sort: get,
        cell: (td, f) => { td.textContent = get(f); if (isWide) td.classList.add("wide"); } });
      const number = (title, get) => ({ title, sort: get, cell: (td, f) => { td.textContent = FORMATS.count(get(f)); } });
      makeTable(table, [text("run", (f) => this.runLabel(runs[f.run])), text("fault", (f) => f.text, true),
        number("times", (f) => f.count), number("first round", (f) => f.first), number("last round", (f) => f.last),
        text("clients", (f) => f.who.join(", "), true)], faults);
      table.parentElement.hidden = false;
    }
  }

  buildExtras(host) {
    host.hidden = false;
    const figure = element("figure", {}, host);
    const select = element("select", { "aria-label": "number" }, element("figcaption", {}, figure));
    for (const name of this.data.extras) element("option", { value: name }, select, name.replaceAll("_", " "));
    const chart = new LineChart(element("div", { class: "plot" }, figure), () => ({
      series: this.series((group) => group.extras[select.value], true),
      x: { ...AXES.rounds, log: false },
      y: { title: select.value, format: "number", log: false, whole: true },
    }), 240);
    select.addEventListener("change", () => { chart.zoom = null; chart.draw(); });
    this.charts.push(chart);
  }

  buildSettings() {
    const { settings, groups, versions } = this.data;
    const differing = settings.filter((setting) => setting.differs);
    const table = document.getElementById("settings-table");
    if (differing.some(({ name }) => name !== "recipe")) {
      const columns = [
        { title: "recipe", isText: true, cell: (td, g) => this.writeName(td, g) },
        ...differing.filter(({ name }) => name !== "recipe").map(({ name, values }) => ({
          title: name.replaceAll("_", " "), isText: true,
          cell: (td, g) => {
            const value = values[groups.indexOf(g)];
            td.textContent = value;
            td.classList.toggle("marked", value !== mostCommon(values));
          } })),
      ];
      makeTable(table, columns, groups);
    } else {
      table.parentElement.hidden = true;
      document.querySelector("#settings .note").hidden = true;
    }
    const pairs = (id, rows) => {
      for (const [key, value] of rows) {
        const row = element("div", {}, document.getElementById(id));
        element("dt", {}, row, key.replaceAll("_", " "));
        element("dd", {}, row, value);
      }
    };
    pairs("shared-settings", settings.filter((s) => !s.differs).map((s) => [s.name, s.values[0]]));
    pairs("versions", versions);
  }

  // ------------------------------------------------------------ keeping in step

  update() {
    this.focus(null);
    document.getElementById("losses-title").textContent =
      this.view.metric === "residual" ? "Loss above its minimum" : "Loss";
    for (const caption of this.byteCaptions) caption.textContent = `against ${BYTES[this.view.bytes]}`;
    for (const [group, row] of this.rows) row.classList.toggle("off", !this.isVisible(group));
    this.drawSwatches();
    this.updateColumns();
    for (const chart of this.charts) chart.measure();
    for (const column of this.columns) column.chart.measure();
    for (const chart of this.charts) chart.draw();
    for (const column of this.columns) this.drawColumn(column);
  }
}

function isVisibleRun(report, run) { return report.isVisible(report.data.groups[run.group]); }

function followTheme(redraw) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = (theme) => { root.dataset.theme = theme; root.style.colorScheme = theme; };
  apply(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => { apply(dark.matches ? "dark" : "light"); redraw(); });
  document.getElementById("theme").addEventListener("click", () => {
    apply(root.dataset.theme === "dark" ? "light" : "dark");
    redraw();
  });
}

async function main() {
  let report = null;
  followTheme(() => { ramp.refresh(); report?.update(); });
  report = new Report(await readData());
  report.build();
  report.update();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) { width = innerWidth; report.update(); }
  });
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

main().catch((error) => {
  const trouble = document.getElementById("trouble");
  trouble.textContent = `This report could not be drawn (${error.message}); a browser from 2023 or later should do.`;
  trouble.hidden = false;
  throw error;
});
