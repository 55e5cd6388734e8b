// Reads what the page holds packed (gzip in base64): plotly and the charts' data. Inflating runs beside the main thread.
"use strict";
const unpack = (id) => {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
};
