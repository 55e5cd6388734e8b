// From the page's data to plotly figures: pure functions of (data, look), where look holds the colours and the width of now.
"use strict";
const figures = (() => {
  // Plotly reads a little HTML in labels; names from a recording must not be read so.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shortened = (text) => plain(text.length > 60 ? `${text.slice(0, 57)}…` : text);

  function layout(look, height, more) {
    const axis = { gridcolor: look.line, zerolinecolor: look.line, linecolor: look.line, automargin: true };
    const { xaxis, yaxis, ...rest } = more;
    return {
      height,
      margin: { l: 8, r: 12, t: 8, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: look.font, size: 12, color: look.text },
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

  const where = (account, index) => (account.hosts[index] ? ` on ${shortened(account.hosts[index])}` : "");

  function accountBars(data, look) {
    const account = data.account;
    const ranks = account.ranks.map(String);
    const traces = data.categories
      .filter((category) => account.values[category.name])
      .map((category) => ({
        type: "bar",
        orientation: "h",
        name: category.label,
        y: ranks,
        x: account.values[category.name],
        marker: { color: look.colours[category.name], line: { width: 0.5, color: look.page } },
        customdata: ranks.map((_, i) => [account.values[category.name][i] / account.steps[i], where(account, i)]),
        hovertemplate:
          `<b>${category.label}</b><br>rank %{y}%{customdata[1]}<br>` +
          `%{x:.4~g} ${account.unit}, %{customdata[0]:.1%} of its step<extra></extra>`,
      }));
    const height = 64 + Math.max(ranks.length, 2) * barHeight(ranks.length);
    const xaxis = { title: { text: `${account.unit} per step` }, rangemode: "tozero" };
    return [traces, layout(look, height, { barmode: "stack", bargap: 0.18, xaxis, yaxis: rankAxis(ranks, look.narrow) })];
  }

  function accountHeatmap(data, look) {
    const account = data.account;
    const named = data.categories.filter((category) => account.values[category.name]);
    const labels = named.map((category) => category.label);
    // Both traces hold all rows, one of them empty where the other is filled: plotly wants every category in each.
    const trace = (mine, colour, title, place, scale) => ({
      type: "heatmap",
      x: account.ranks,
      y: labels,
      z: named.map((category) =>
        account.values[category.name].map((value, i) => (mine(category) ? (100 * value) / account.steps[i] : null)),
      ),
      ...scale,
      hoverongaps: false,
      colorscale: [[0, look.raised], [1, colour]],
      customdata: named.map((category) => account.values[category.name].map((value, i) => [value, where(account, i)])),
      hovertemplate:
        `<b>%{y}</b><br>rank %{x}%{customdata[1]}<br>%{customdata[0]:.4~g} ${account.unit}, %{z:.1f}% of its step<extra></extra>`,
      colorbar: { title: { text: title }, thickness: 10, len: 0.5, y: place, yanchor: "middle", ticksuffix: "%", outlinewidth: 0 },
      showscale: !look.narrow,
    });
    const isCompute = (category) => category.name === "compute";
    const traces = [];
    if (named.some(isCompute)) traces.push(trace(isCompute, look.colours.compute, "compute", 0.78, {}));
    if (!named.every(isCompute)) {
      const isLoss = (category) => !isCompute(category);
      const largest = named.filter(isLoss).flatMap((category) => account.values[category.name].map((value, i) => value / account.steps[i]));
      const zmax = 100 * largest.reduce((a, b) => Math.max(a, b), 0);
      traces.push(trace(isLoss, look.colours.exposed_comm_wait, "the rest", 0.22, { zmin: 0, zmax }));
    }
    const yaxis = { autorange: "reversed", showgrid: false, fixedrange: true, ticksuffix: " " };
    return [traces, layout(look, 90 + 34 * named.length, { xaxis: { title: { text: "rank" }, showgrid: false }, yaxis })];
  }

  const account = (data, look) => (data.account.kind === "heatmap" ? accountHeatmap(data, look) : accountBars(data, look));

  function strips(data, look) {
    const { rows, unit } = data.strips;
    const ranks = rows.map((row) => String(row.rank));
    const traces = data.categories.map((category, index) => {
      const picked = { y: [], x: [], base: [] };
      for (const row of rows) {
        row.category.forEach((number, i) => {
          if (number !== index) return;
          picked.y.push(String(row.rank));
          picked.x.push(row.duration[i]);
          picked.base.push(row.start[i]);
        });
      }
      return {
        type: "bar",
        orientation: "h",
        name: category.label,
        ...picked,
        marker: { color: look.colours[category.name], line: { width: 0 } },
        hovertemplate: `<b>${category.label}</b><br>rank %{y}<br>%{x:.4~g} ${unit} from %{base:.4~g} ${unit}<extra></extra>`,
      };
    });
    const yaxis = { ...rankAxis(ranks, look.narrow), categoryorder: "array", categoryarray: ranks, dtick: 1 };
    const xaxis = { title: { text: `${unit} from the step's start` }, rangemode: "tozero" };
    const height = 64 + Math.max(ranks.length, 2) * (ranks.length > 8 ? 20 : 34);
    return [traces.filter((trace) => trace.x.length), layout(look, height, { barmode: "overlay", bargap: 0.25, xaxis, yaxis })];
  }

  function steps(data, look) {
    const { numbers, times, unit, median } = data.steps;
    const line = {
      type: "scatter",
      mode: numbers.length > 200 ? "lines" : "lines+markers",
      x: numbers,
      y: times,
      line: { color: look.colours.compute, width: 2 },
      marker: { size: 6 },
      hovertemplate: `step %{x}<br>%{y:.4~g} ${unit}<extra></extra>`,
    };
    const shape = { type: "line", xref: "paper", x0: 0, x1: 1, y0: median, y1: median, line: { dash: "dash", width: 1, color: look.muted } };
    const xaxis = { title: { text: "step" }, tickformat: "d", showgrid: false, nticks: 12 };
    if (numbers.length <= 12) xaxis.dtick = Math.max(1, Math.round((numbers.at(-1) - numbers[0]) / (numbers.length - 1)));
    return [[line], layout(look, 230, { shapes: [shape], xaxis, yaxis: { title: { text: unit }, rangemode: "tozero" } })];
  }

  function sizeName(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), units.length - 1);
    return `${Number((bytes / 2 ** (10 * power)).toPrecision(3))} ${units[power]}`;
  }

  function bandwidth(data, look) {
    const palette = ["compute", "exposed_comm_transfer", "idle_sync", "exposed_copy", "exposed_comm_wait", "idle_host"];
    const traces = [];
    let sizes = [];
    data.bandwidth.series.forEach((series, index) => {
      const colour = look.colours[palette[index % palette.length]];
      const name = shortened(series.name);
      sizes = sizes.concat(series.bytes);
      traces.push({
        type: "scatter",
        mode: "markers",
        name,
        x: series.bytes,
        y: series.busbw,
        text: series.bytes.map(sizeName),
        marker: { color: colour, size: 9, symbol: index % 8 },
        hovertemplate: `<b>${name}</b><br>%{text}: %{y:.3~g} GB/s<extra></extra>`,
      });
      if (series.curve) {
        const curve = { x: series.curve.bytes, y: series.curve.busbw, line: { color: colour, width: 1.5 } };
        traces.push({ type: "scatter", mode: "lines", ...curve, hoverinfo: "skip", showlegend: false });
      }
    });
    let ticks = [];
    const low = Math.floor(Math.log2(Math.min(...sizes)));
    const high = Math.ceil(Math.log2(Math.max(...sizes)));
    const stride = Math.max(1, Math.ceil((high - low) / (look.narrow ? 4 : 10)));
    for (let power = low; power <= high; power += stride) ticks.push(2 ** power);
    if (ticks.length < 4) ticks = [...new Set(sizes)].slice(0, 6);
    const xaxis = { type: "log", title: { text: "size" }, tickvals: ticks, ticktext: ticks.map(sizeName) };
    const yaxis = { title: { text: "bus bandwidth, GB/s" }, rangemode: "tozero" };
    const legend = { orientation: "h", y: 1, yanchor: "bottom", x: 0 };
    return [traces, layout(look, 300, { showlegend: true, legend, xaxis, yaxis })];
  }

  return { account, strips, steps, bandwidth };
})();
