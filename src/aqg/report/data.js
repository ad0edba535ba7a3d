"use strict";
// The report's data, as `aqg.report.packing` packs it.

async function readData() {
  const text = atob(document.getElementById("data").textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const content = await new Response(stream).arrayBuffer();
  const length = new DataView(content).getUint32(0, true);
  const start = 4 + length;
  const types = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
  const header = new TextDecoder().decode(new Uint8Array(content, 4, length));
  return JSON.parse(header, (key, value) => {
    if (value === null || typeof value !== "object" || !("$" in value)) return value;
    const [type, offset, count] = value.$;
    return new types[type](content, start + offset, count);
  });
}
