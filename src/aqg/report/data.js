"use strict";
// The report's data, as `aqg.report.write` packs it.

async function readData() {
  const text = atob(document.getElementById("data").textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text(), (key, value) => {
    if (value === null || typeof value !== "object" || !("$" in value)) return value;
    return Float64Array.from(value.$, (number) => number ?? NaN);
  });
}
