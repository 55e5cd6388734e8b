// Communication across ranks: how much of it is hidden, who arrives last.
"use strict";
Object.assign(figures, (() => {
  const { shortened, layout, legendAbove } = drawing;

  // Up to here ranks are bars; of more, areas or the few that stand out.
  const FEW = 64;

  function byRank(look, ranks, traces, title, more) {
    const few = ranks.length <= FEW;
    const xaxis = { title: { text: "rank" }, showgrid: false, nticks: look.narrow ? 6 : 24, tickangle: 0, tickformat: "d" };
    if (few) xaxis.type = "category";
    else xaxis.range = [ranks[0] - 1, ranks.at(-1) + 1];
    const yaxis = { title: { text: title }, rangemode: "tozero", ...more };
    const common = { barmode: "stack", bargap: 0.25, showlegend: true, legend: legendAbove };
    return [traces, layout(look, 270, { ...common, xaxis, yaxis })];
  }

  function overlap(data, look) {
    const { unit, ranks, ...parts } = data.overlap;
    const named = {
      hidden: ["overlapped by compute", "idle_unknown"],
      wait: ["waiting for late ranks", "exposed_comm_wait"],
      transfer: ["exposed transfer", "exposed_comm_transfer"],
    };
    const bars = (colour) => ({ type: "bar", marker: { color: colour, line: { width: 0 } } });
    const areas = (colour) => ({ type: "scatter", mode: "lines", stackgroup: "all", fillcolor: colour, line: { width: 0, shape: "hvh", color: colour } });
    const traces = Object.entries(named).map(([key, [name, colour]]) => ({
      ...(ranks.length <= FEW ? bars : areas)(look.colours[colour]),
      name,
      x: ranks,
      y: parts[key],
      customdata: ranks.map((_, i) => parts[key][i] / (parts.hidden[i] + parts.wait[i] + parts.transfer[i])),
      hovertemplate: `<b>${name}</b><br>rank %{x}<br>%{y:.4~g} ${unit}, %{customdata:.1%} of its communication<extra></extra>`,
    }));
    return byRank(look, ranks, traces, `${unit} per step`, {});
  }

  function arrivals(data, look) {
    const palette = ["exposed_comm_wait", "compute", "exposed_comm_transfer", "idle_sync", "idle_unknown"];
    const { ranks, series } = data.arrivals;
    const traces = series.map((one, index) => ({
      type: "bar",
      name: shortened(one.name, 40),
      x: ranks.length <= FEW ? ranks : ranks.filter((_, i) => one.share[i] > 0),
      y: ranks.length <= FEW ? one.share : one.share.filter((part) => part > 0),
      // Seen even where a rank is narrower than a pixel.
      width: ranks.length <= FEW ? undefined : Math.max(0.8, (ranks.at(-1) - ranks[0]) / 400),
      marker: { color: look.colours[palette[index]], line: { width: 0 } },
      hovertemplate: `<b>${shortened(one.name, 40)}</b><br>rank %{x} comes last to %{y:.1%} of all collectives<extra></extra>`,
    }));
    return byRank(look, ranks, traces, "arrived last in", { tickformat: ".1~%" });
  }

  return { overlap, arrivals };
})());
