// Tables: cells with spreads, and headings to sort by.

function mostCommon(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0][0];
}

function writeSpread(td, spread, format, group, key) {
  if (!spread) {
    const isCost = key.startsWith("target_") && group.target !== null && group.finished;
    const isMissed = isCost && group.reached < group.runs.length;
    const isUnknown = isCost || key === "download_bytes" || key === "total_bytes"; // not on record
    element("span", { class: "unit-none" }, td, isMissed ? missedText(group) : isUnknown ? "unknown" : "–");
    return;
  }
  const [median, low, high] = spread;
  td.append(FORMATS[format](median));
  if (high > low) element("span", { class: "spread" }, td, writeRange(low, high, FORMATS[format]));
}

function missedText(group) {
  return group.reached ? `${group.reached} of ${group.runs.length} reached` : "not reached";
}

function writeTotal(td, numbers) {
  td.append(numbers ? FORMATS.number(numbers.total ?? numbers.mean) : "–");
  if (numbers?.largest !== undefined) {
    element("span", { class: "spread" }, td, `up to ${FORMATS.number(numbers.largest)}`);
  }
}

// Two values, with their unit once if they share it.
function writeRange(low, high, write) {
  const [a, b] = [write(low), write(high)];
  const [value, unit] = a.split(" ");
  return `${unit && b.endsWith(` ${unit}`) ? value : a} – ${b}`;
}

// Fill a table; columns with `sort` have headings to click. Returns a map from item to row.
function makeTable(table, columns, items) {
  const head = element("tr", {}, element("thead", {}, table));
  const body = element("tbody", {}, table);
  const rows = new Map();
  for (const item of items) {
    const row = element("tr", {}, body);
    for (const { isText, cell } of columns) cell(element("td", isText ? { class: "text" } : {}, row), item);
    rows.set(item, row);
  }
  for (const { title, isText, sort } of columns) {
    const th = element("th", { scope: "col", ...(isText ? { class: "text" } : {}) }, head);
    if (!sort) { th.textContent = title; continue; }
    element("button", { type: "button" }, th, title).addEventListener("click", () => {
      const isAscending = th.getAttribute("aria-sort") !== "ascending";
      for (const other of head.children) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
      const direction = isAscending ? 1 : -1;
      const ordered = [...rows.keys()].sort((a, b) => {
        const [x, y] = [sort(a), sort(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return direction * (typeof x === "number" ? x - y
          : String(x).localeCompare(String(y), "en", { numeric: true }));
      });
      for (const item of ordered) body.append(rows.get(item));
    });
  }
  return rows;
}
