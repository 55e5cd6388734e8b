// The time breakdown, one step of all ranks, step times, bandwidth, memory and machines as plotly figures: pure functions of (data, look), where
// look holds the colours, the width and the reader's choices of now.
"use strict";
const figures = (() => {
  const { plain, shortened, layout, rankAxis, barHeight, legendAbove } = drawing;

  const where = (breakdown, index) => (breakdown.hosts[index] ? ` on ${shortened(breakdown.hosts[index])}` : "");

  // The ranks by host and number, or by step time or one category, the most first.
  function sorted(breakdown, by) {
    const key = by === "step" ? breakdown.steps : breakdown.values[by];
    const hostFirst = (a, b) => breakdown.hosts[a].localeCompare(breakdown.hosts[b], undefined, { numeric: true });
    const order = breakdown.ranks.map((_, i) => i);
    order.sort((a, b) => (key ? key[b] - key[a] : hostFirst(a, b)) || breakdown.ranks[a] - breakdown.ranks[b]);
    const pick = (values) => order.map((i) => values[i]);
    const values = Object.fromEntries(Object.entries(breakdown.values).map(([name, one]) => [name, pick(one)]));
    return { ...breakdown, ranks: pick(breakdown.ranks), hosts: pick(breakdown.hosts), steps: pick(breakdown.steps), values };
  }

  function breakdownBars(data, look) {
    const breakdown = sorted(data.breakdown, look.chosen.sort);
    const ranks = breakdown.ranks.map(String);
    // Hosts as a second level of the axis, where there are several and the order keeps them together.
    const grouped = look.chosen.sort === "rank" && new Set(breakdown.hosts).size > 1 && !look.narrow;
    const places = grouped ? [breakdown.hosts.map((host) => shortened(host, 18)), ranks] : ranks;
    const traces = data.categories
      .filter((category) => breakdown.values[category.name])
      .map((category) => ({
        type: "bar",
        orientation: "h",
        name: category.label,
        y: places,
        x: breakdown.values[category.name],
        marker: { color: look.colours[category.name], line: { width: 0.5, color: look.page } },
        customdata: ranks.map((rank, i) => [breakdown.values[category.name][i] / breakdown.steps[i], where(breakdown, i), rank]),
        hovertemplate:
          `<b>${category.label}</b><br>rank %{customdata[2]}%{customdata[1]}<br>` +
          `%{x:.4~g} ${breakdown.unit}, %{customdata[0]:.1%} of its step<extra></extra>`,
      }));
    const height = 64 + Math.max(ranks.length, 2) * barHeight(ranks.length);
    const xaxis = { title: { text: `${breakdown.unit} per step` }, rangemode: "tozero" };
    const yaxis = rankAxis(ranks, look.narrow || grouped);
    if (grouped) Object.assign(yaxis, { type: "multicategory", dtick: undefined, ticksuffix: "", tickson: "boundaries" });
    return [traces, layout(look, height, { barmode: "stack", bargap: 0.18, xaxis, yaxis })];
  }

  function breakdownHeatmap(data, look) {
    const breakdown = data.breakdown;
    const named = data.categories.filter((category) => breakdown.values[category.name]);
    const labels = named.map((category) => category.label);
    // Both traces hold all rows, one of them empty where the other is filled: plotly wants every category in each.
    const trace = (mine, colour, title, place, scale) => ({
      type: "heatmap",
      x: breakdown.ranks,
      y: labels,
      z: named.map((category) =>
        breakdown.values[category.name].map((value, i) => (mine(category) ? (100 * value) / breakdown.steps[i] : null)),
      ),
      ...scale,
      hoverongaps: false,
      colorscale: [[0, look.raised], [1, colour]],
      customdata: named.map((category) => breakdown.values[category.name].map((value, i) => [value, where(breakdown, i)])),
      hovertemplate:
        `<b>%{y}</b><br>rank %{x}%{customdata[1]}<br>%{customdata[0]:.4~g} ${breakdown.unit}, %{z:.1f}% of its step<extra></extra>`,
      colorbar: { title: { text: title }, thickness: 10, len: 0.5, y: place, yanchor: "middle", ticksuffix: "%", outlinewidth: 0 },
      showscale: !look.narrow,
    });
    const isCompute = (category) => category.name === "compute";
    const traces = [];
    if (named.some(isCompute)) traces.push(trace(isCompute, look.colours.compute, "compute", 0.78, {}));
    if (!named.every(isCompute)) {
      const isLoss = (category) => !isCompute(category);
      const largest = named.filter(isLoss).flatMap((category) => breakdown.values[category.name].map((value, i) => value / breakdown.steps[i]));
      const zmax = 100 * largest.reduce((a, b) => Math.max(a, b), 0);
      traces.push(trace(isLoss, look.colours.exposed_comm_wait, "other categories", 0.22, { zmin: 0, zmax }));
    }
    const yaxis = { autorange: "reversed", showgrid: false, fixedrange: true, ticksuffix: " " };
    return [traces, layout(look, 90 + 34 * named.length, { xaxis: { title: { text: "rank" }, showgrid: false }, yaxis })];
  }

  const breakdown = (data, look) => (data.breakdown.kind === "heatmap" ? breakdownHeatmap(data, look) : breakdownBars(data, look));

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
        const ends = [series.curve.bytes[0], series.curve.bytes.at(-1)];
        const limit = { x: ends, y: [series.limit, series.limit], line: { color: colour, width: 1, dash: "dot" } };
        const hovertemplate = `<b>${name}</b><br>limit of its links, by the fit: %{y:.3~g} GB/s<extra></extra>`;
        traces.push({ type: "scatter", mode: "lines", ...limit, hovertemplate, showlegend: false });
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
    const legend = legendAbove;
    return [traces, layout(look, 300, { showlegend: true, legend, xaxis, yaxis })];
  }

  function memory(data, look) {
    const { series, capacity, unit, size } = data.memory;
    const palette = ["compute", "exposed_comm_transfer", "idle_sync", "exposed_copy"];
    const traces = [];
    series.forEach((one, index) => {
      const colour = look.colours[palette[index % palette.length]];
      const name = plain(one.name);
      const course = (values, what, dash) => ({
        type: "scatter",
        mode: "lines",
        name,
        legendgroup: name,
        x: one.time,
        y: values,
        // What is held stays so until the next allocation.
        line: { color: colour, width: 1.5, dash, shape: "hv" },
        hovertemplate: `<b>${name}</b>, ${what}<br>%{y:.4~g} ${size} at %{x:.4~g} ${unit}<extra></extra>`,
      });
      if (one.allocated) traces.push(course(one.allocated, "tensors", "solid"));
      if (one.reserved) traces.push({ ...course(one.reserved, "held", "dash"), showlegend: !one.allocated });
    });
    if (capacity !== null) {
      const ends = series.flatMap((one) => [one.time[0], one.time.at(-1)]);
      const x = [Math.min(...ends), Math.max(...ends)];
      const line = { color: look.muted, width: 1, dash: "dot" };
      traces.push({ type: "scatter", mode: "lines", name: "capacity", x, y: [capacity, capacity], line, hoverinfo: "skip" });
    }
    const xaxis = { title: { text: `${unit} from the first step's start` }, rangemode: "tozero", showgrid: false };
    const legend = legendAbove;
    const showlegend = series.length > 1 || capacity !== null;
    return [traces, layout(look, 280, { showlegend, legend, xaxis, yaxis: { title: { text: size }, rangemode: "tozero" } })];
  }

  function system(data, look) {
    const { rows, unit, window: shaded } = data.system;
    const palette = ["compute", "exposed_comm_transfer", "idle_sync", "exposed_copy", "exposed_comm_wait", "idle_host", "idle_dependency", "idle_launch"];
    const colours = {};
    for (const one of rows.flatMap((row) => row.series)) colours[one.name] ??= look.colours[palette[Object.keys(colours).length % palette.length]];
    const gap = 0.08;
    const tall = (1 - gap * (rows.length - 1)) / rows.length;
    const traces = [];
    const axes = {};
    const named = new Set();
    rows.forEach((row, index) => {
      const number = index ? String(index + 1) : "";
      const top = 1 - index * (tall + gap);
      axes[`yaxis${number}`] = {
        domain: [Math.max(top - tall, 0), top],
        title: { text: row.axis, font: { size: 11 } },
        rangemode: "tozero",
        gridcolor: look.line,
        zerolinecolor: look.line,
        automargin: true,
        nticks: 4,
      };
      for (const one of row.series) {
        const name = shortened(one.name);
        traces.push({
          type: "scatter",
          mode: one.time.length > 60 ? "lines" : "lines+markers",
          name,
          legendgroup: name,
          showlegend: !named.has(name),
          x: one.time,
          y: one.values,
          yaxis: `y${number}`,
          line: { color: colours[one.name], width: 1.5 },
          marker: { size: 4 },
          hovertemplate: `<b>${name}</b><br>%{y:.4~g} at %{x:.4~g} ${unit}<extra>${plain(row.axis)}</extra>`,
        });
        named.add(name);
      }
    });
    const shade = { type: "rect", xref: "x", yref: "paper", x0: shaded[0], x1: shaded[1], y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: look.line };
    const { yaxis, ...others } = axes;
    const xaxis = { title: { text: `${unit} from the first recorded step` }, showgrid: false, anchor: rows.length > 1 ? `y${rows.length}` : "y" };
    const legend = legendAbove;
    const figure = layout(look, 80 + 130 * rows.length, { showlegend: named.size > 1, legend, shapes: [shade], xaxis, yaxis });
    return [traces, { ...figure, ...others }];
  }

  return { breakdown, strips, steps, bandwidth, memory, system };
})();
