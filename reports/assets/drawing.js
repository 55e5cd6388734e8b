// What all figures share: text from a recording made safe for plotly, the layout, the axis of ranks.
"use strict";
const drawing = (() => {
  // Plotly reads a little HTML in labels; names from a recording must not be read so.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shortened = (text, most = 60) => plain(text.length > most ? `${text.slice(0, most - 3)}…` : text);

  function layout(look, height, more) {
    const axis = { gridcolor: look.line, zerolinecolor: look.line, linecolor: look.line, automargin: true };
    const { xaxis, yaxis, ...rest } = more;
    return {
      height,
      margin: { l: 8, r: 12, t: 8, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: look.font, size: look.size, color: look.text },
      hoverlabel: { align: "left", bgcolor: look.raised, bordercolor: look.line, font: { color: look.text, family: look.font } },
      showlegend: false,
      dragmode: look.narrow ? false : "zoom",
      ...rest,
      xaxis: { ...axis, ...xaxis },
      yaxis: { ...axis, ...yaxis },
    };
  }

  const rankAxis = (ranks, narrow) => ({
    type: "category",
    autorange: "reversed",
    showgrid: false,
    ticksuffix: " ",
    tickprefix: narrow || ranks.length > 32 ? "" : "rank ",
    fixedrange: true,
    // Every rank is named as long as its name has room.
    dtick: ranks.length > 32 ? 4 : 1,
  });

  const barHeight = (count) => (count > 32 ? 13 : count > 8 ? 20 : 30);

  const legendAbove = { orientation: "h", y: 1, yanchor: "bottom", x: 0 };

  return { plain, shortened, layout, rankAxis, barHeight, legendAbove };
})();
