// The step's timeline by lanes, the critical path, the run's history and the what-if curves.
"use strict";
Object.assign(figures, (() => {
  const { plain, shortened, layout, legendAbove } = drawing;

  const COLOURS = {
    compute: "compute",
    wait: "exposed_comm_wait",
    transfer: "exposed_comm_transfer",
    copy: "exposed_copy",
    host: "idle_host",
    backward: "idle_sync",
    loader: "idle_dataloader",
  };
  // A run of short events is as pale as it is empty, but never so pale that it cannot be seen.
  const PALEST = 0.3;

  function told(texts, lane, i, unit) {
    const name = lane.name[i] === null ? "" : shortened(texts[lane.name[i]], 90);
    const lines = [];
    const pieces = lane.pieces?.[i] ?? 1;
    if (pieces > 1) lines.push(`${pieces} short events, busy ${Math.round(100 * lane.busy[i])}%; the longest:`);
    lines.push(`<b>${name || plain(lane.kind)}</b>`);
    const operator = lane.operator?.[i];
    if (operator !== null && operator !== undefined) lines.push(`launched by ${shortened(texts[operator], 90)}`);
    if (lane.bytes?.[i]) lines.push(lane.bytes[i]);
    if (lane.group) lines.push(`group ${shortened(texts[lane.group[i]])}`);
    const wait = lane.wait?.[i];
    const short = (value) => `${Number(value.toPrecision(4))} ${unit}`;
    if (wait !== null && wait !== undefined) lines.push(`wait ${short(wait)}, transfer ${short(lane.duration[i] - wait)}`);
    lines.push(`${short(lane.duration[i])} from ${short(lane.start[i])}`);
    return lines.join("<br>");
  }

  function timeline(data, look) {
    const { unit, ranks, labels, texts } = data.timeline;
    const shown = ranks.filter((row) => look.chosen.ranks.has(row.rank));
    const parts = {};
    const rows = [];
    for (const { rank, lanes } of shown) {
      for (const lane of lanes) {
        const place = `${look.narrow ? "" : "rank "}${rank} · ${labels[lane.kind]}`;
        rows.push(place);
        const put = (kind, start, length, opacity, text) => {
          const part = (parts[kind] ??= { y: [], x: [], base: [], opacity: [], text: [] });
          part.y.push(place);
          part.x.push(length);
          part.base.push(start);
          part.opacity.push(opacity);
          part.text.push(text);
        };
        lane.start.forEach((start, i) => {
          const text = told(texts, lane, i, unit);
          if (lane.kind !== "communication") {
            put(lane.kind, start, lane.duration[i], Math.max(lane.busy?.[i] ?? 1, PALEST), text);
            return;
          }
          const wait = lane.wait[i] ?? 0;
          if (wait > 0) put("wait", start, wait, 1, text);
          put("transfer", start + wait, lane.duration[i] - wait, 1, text);
        });
      }
    }
    const names = { ...labels, wait: "waiting in a collective", transfer: "transfer" };
    const traces = Object.keys(COLOURS)
      .filter((kind) => parts[kind])
      .map((kind) => ({
        type: "bar",
        orientation: "h",
        name: names[kind],
        y: parts[kind].y,
        x: parts[kind].x,
        base: parts[kind].base,
        // `text` would be drawn into the bars.
        customdata: parts[kind].text,
        textposition: "none",
        marker: { color: look.colours[COLOURS[kind]], opacity: parts[kind].opacity, line: { width: 0 } },
        hovertemplate: "%{customdata}<extra></extra>",
      }));
    const yaxis = { type: "category", categoryorder: "array", categoryarray: rows, autorange: "reversed", showgrid: false, fixedrange: true, ticksuffix: " " };
    const xaxis = { title: { text: `${unit} from the step's start` }, rangemode: "tozero" };
    const more = { barmode: "overlay", bargap: 0.2, showlegend: true, legend: legendAbove, xaxis, yaxis };
    return [traces, layout(look, 110 + Math.max(rows.length, 2) * 24, more)];
  }

  function path(data, look) {
    const { unit, rows, values, total } = data.path;
    const labels = Object.fromEntries(data.categories.map(({ name, label }) => [name, label]));
    const traces = Object.entries(values).map(([name, lengths]) => ({
      type: "bar",
      orientation: "h",
      name: labels[name],
      y: rows,
      x: lengths,
      marker: { color: look.colours[name], line: { width: 0.5, color: look.page } },
      customdata: lengths.map((length) => length / total),
      hovertemplate: `<b>${labels[name]}</b><br>%{y}<br>%{x:.4~g} ${unit}, %{customdata:.1%} of the critical path<extra></extra>`,
    }));
    const yaxis = { type: "category", autorange: "reversed", showgrid: false, fixedrange: true, ticksuffix: " " };
    const xaxis = { title: { text: `${unit} of the critical path` }, rangemode: "tozero" };
    return [traces, layout(look, 64 + Math.max(rows.length, 2) * 26, { barmode: "stack", bargap: 0.2, xaxis, yaxis })];
  }

  function history(data, look) {
    const { unit, first, last, median, longest, outliers, recorded } = data.history;
    const middle = first.map((step, i) => (step + last[i]) / 2);
    const spans = first.map((step, i) => (step === last[i] ? `step ${step}` : `steps ${step} to ${last[i]}`));
    const line = (name, y, colour, width) => ({
      type: "scatter",
      mode: middle.length > 60 ? "lines" : "lines+markers",
      name,
      x: middle,
      y,
      customdata: spans,
      line: { color: colour, width },
      marker: { size: 4 },
      hovertemplate: `<b>${name}</b><br>%{customdata}: %{y:.4~g} ${unit}<extra></extra>`,
    });
    const traces = [
      line("longest step", longest, look.colours.idle_launch, 1),
      line("median step", median, look.colours.compute, 2),
      {
        type: "scatter",
        mode: "markers",
        name: "outlier",
        x: outliers.map((one) => one.step),
        y: outliers.map((one) => one.time),
        customdata: outliers.map((one) => `${plain(one.stage)}, rank ${one.rank}`),
        marker: { color: look.colours.exposed_comm_wait, symbol: "x", size: 8 },
        hovertemplate: `<b>outlier</b><br>step %{x}: %{y:.4~g} ${unit}<br>%{customdata}<extra></extra>`,
      },
    ];
    const shade = recorded && { type: "rect", xref: "x", yref: "paper", x0: recorded[0] - 0.5, x1: recorded[1] + 0.5, y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: look.line };
    const xaxis = { title: { text: "step" }, tickformat: "d", showgrid: false };
    const more = { showlegend: true, legend: legendAbove, shapes: shade ? [shade] : [], xaxis, yaxis: { title: { text: unit }, rangemode: "tozero" } };
    return [traces, layout(look, 270, more)];
  }

  function curve(data, look, index) {
    const { of, unit, values, low, mid, high, current } = data.curves[index];
    const band = (y, fill) => ({ type: "scatter", mode: "lines", x: values, y, line: { width: 0 }, fill, fillcolor: look.line, hoverinfo: "skip", showlegend: false });
    const traces = [
      band(low, "none"),
      band(high, "tonexty"),
      {
        type: "scatter",
        mode: "lines+markers",
        name: "predicted step",
        x: values,
        y: mid,
        customdata: low.map((value, i) => [value, high[i]]),
        line: { color: look.colours.compute, width: 2 },
        marker: { size: 6 },
        hovertemplate: `%{x} ${of}<br><b>%{y:.4~g} ${unit}</b> (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})<extra></extra>`,
      },
    ];
    const now = values.indexOf(current);
    if (now >= 0) {
      const marker = { size: 15, symbol: "circle-open", color: look.colours.exposed_comm_wait, line: { width: 2.5 } };
      traces.push({ type: "scatter", mode: "markers", name: "now", x: [current], y: [mid[now]], marker, hoverinfo: "skip" });
    }
    // Values that double from one to the next want a scale on which they are evenly spread.
    const spread = values[0] > 0 && values.at(-1) / values[0] > 20;
    const xaxis = { title: { text: of }, type: spread ? "log" : "linear", tickvals: values, ticktext: values.map(String), showgrid: false };
    // From zero a curve that matters may look flat; but what differs by a hair must not look like a cliff either.
    const [least, most] = [Math.min(...low), Math.max(...high)];
    const room = Math.max(0.1 * (most - least), 0.1 * most);
    const range = [Math.max(0, least - room), most + room];
    return [traces, layout(look, 260, { xaxis, yaxis: { title: { text: `${unit} per step` }, range } })];
  }

  return { timeline, path, history, curve };
})());
