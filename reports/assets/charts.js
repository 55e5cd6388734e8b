// Shows the figures, and fits them to the reader: light or dark, screen or paper, narrow or wide, the ranks and the
// order of choice. What is drawn was made before, in Python.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 600; // Pixels.
  const NEAR = 1.5; // Screens: charts further away are drawn when the reader comes near.

  let packed; // As text: colours are exchanged in it.
  let figures;
  let inDark;
  const checked = [...document.querySelectorAll("#timeline-ranks input:checked")];
  const chosen = { order: "rank", ranks: new Set(checked.map((box) => Number(box.value))) }; // The reader's choices.

  const places = [...document.querySelectorAll(".plot")];
  const pending = new Set(places);

  async function load() {
    const plotly = unpack("plotly").arrayBuffer();
    packed = await unpack("figures").text();
    const script = document.createElement("script");
    script.src = URL.createObjectURL(new Blob([await plotly], { type: "text/javascript" }));
    await new Promise((resolve, reject) => {
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error("plotly did not start")));
      document.head.append(script);
    });
    URL.revokeObjectURL(script.src);
    // What is drawn later has its room already.
    for (const place of places) place.style.height = `${fitted(nameOf(place))[1].height}px`;
  }

  // Colours are text between quotes, each with its counterpart in the dark.
  function inColours() {
    const wanted = (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches) && !root.classList.contains("paper");
    if (wanted !== inDark) {
      const made = JSON.parse(packed);
      const exchanged = packed.replace(/"(#[0-9a-f]{6})"/g, (all, colour) => `"${made.dark[colour] ?? colour}"`);
      figures = (wanted ? JSON.parse(exchanged) : made).figures;
      inDark = wanted;
    }
    return figures;
  }

  // A layout with some of its values exchanged, one level deep.
  function changed(layout, more) {
    const made = { ...layout };
    for (const [name, value] of Object.entries(more ?? {})) made[name] = typeof value === "object" ? { ...made[name], ...value } : value;
    return made;
  }

  const chosenRanks = (meta) => Object.keys(meta.lanes).filter((rank) => chosen.ranks.has(Number(rank)));

  const nameOf = (place) => place.id.slice("chart-".length);

  function fitted(name) {
    let { data, layout } = inColours()[name];
    const { meta } = layout;
    // The page writes the title as a heading; labels grow with its text on very wide screens.
    const body = getComputedStyle(document.body);
    const font = { family: body.fontFamily, size: Math.round(0.8 * parseFloat(body.fontSize)) };
    layout = changed(layout, { title: { text: "" }, margin: { t: layout.margin.t - meta.titled }, font });
    layout.height -= meta.titled;
    if (meta.orders) layout = changed(layout, meta.orders[chosen.order]);
    if (meta.lanes) {
      const rows = chosenRanks(meta).flatMap((rank) => meta.lanes[rank]);
      // A trace is of a rank, or links two.
      data = data.map((trace) => (trace.meta === undefined ? trace : { ...trace, visible: [trace.meta].flat().every((rank) => chosen.ranks.has(rank)) }));
      const link = data.find((trace) => trace.legendgroup === "link" && trace.visible);
      data = data.map((trace) => (trace.legendgroup === "link" ? { ...trace, showlegend: trace === link } : trace));
      layout = changed(layout, { yaxis: { categoryarray: rows }, height: 110 + Math.max(rows.length, 2) * meta.row });
    }
    if (root.clientWidth < NARROW) layout = changed(layout, meta.narrow);
    return [data, layout];
  }

  function drawOne(place) {
    if (!place.clientWidth) return pending.add(place); // Inside something folded.
    pending.delete(place);
    const [data, layout] = fitted(nameOf(place));
    // Not plotly's own fitting: that forgets the height.
    layout.width = place.clientWidth;
    place.style.height = `${layout.height}px`;
    Plotly.react(place, data, layout, { displaylogo: false, displayModeBar: false, doubleClick: "reset" });
    place.dispatchEvent(new Event("drawn"));
  }

  // What is loading is drawn in the look that there is then.
  function drawAgain(some = () => true) {
    if (!window.Plotly) return;
    for (const place of places) if (!pending.has(place) && some(place)) drawOne(place);
    drawNear();
  }

  function redraw(name) {
    drawAgain((place) => nameOf(place) === name);
  }

  // How far from the screen a chart's place is, in screens; 0 on it.
  function distance(place) {
    const box = place.getBoundingClientRect();
    return Math.max(box.top - window.innerHeight, -box.bottom, 0) / window.innerHeight;
  }

  // One chart after the other, always the one nearest to what the reader looks at; in between the page answers.
  let drawing = false;
  function drawNear() {
    if (drawing || !window.Plotly) return;
    const [nearest] = [...pending].filter((place) => place.clientWidth).map((place) => [distance(place), place]).sort((a, b) => a[0] - b[0]);
    if (!(nearest?.[0] <= NEAR)) return finished();
    drawing = true;
    drawOne(nearest[1]);
    setTimeout(() => {
      drawing = false;
      drawNear();
    }, 0);
  }

  function finished() {
    if (root.dataset.charts !== "drawn") performance.mark("perfscope-charts");
    root.dataset.charts = "drawn";
  }

  // On paper the first change is unfolded; settings, the glossary, other evidence and long tables stay folded.
  const opened = [];
  function toPaper() {
    root.classList.add("paper");
    for (const details of document.querySelectorAll("#finding-1:not([open])")) {
      details.open = true;
      opened.push(details);
    }
    if (window.Plotly) pending.clear();
    drawAgain();
  }

  function toScreen() {
    root.classList.remove("paper");
    for (const details of opened.splice(0)) details.open = false;
    drawAgain();
  }

  // After the first paint; a page in a hidden tab is not painted, and is drawn all the same.
  let begun = false;
  const begin = () => {
    if (begun) return;
    begun = true;
    load().then(drawNear, (error) => {
      for (const place of places) place.textContent = `This browser cannot draw the charts (${error.message}). Use a browser from 2023 or later.`;
    });
  };
  requestAnimationFrame(() => setTimeout(begin, 0));
  setTimeout(begin, 300);
  dark.addEventListener("change", () => drawAgain());
  root.addEventListener("theme", () => drawAgain());
  document.addEventListener("scroll", drawNear, { passive: true });
  document.addEventListener("toggle", drawNear, true);
  let resized = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => drawAgain((place) => place.clientWidth !== place.layout.width), 100);
  });
  document.getElementById("breakdown-sort")?.addEventListener("change", (event) => {
    chosen.order = event.target.value;
    redraw("time_breakdown");
  });
  document.getElementById("timeline-ranks")?.addEventListener("change", (event) => {
    const rank = Number(event.target.value);
    if (event.target.checked) chosen.ranks.add(rank);
    else chosen.ranks.delete(rank);
    const command = document.querySelector("#merge-command code");
    command.textContent = command.textContent.replace(/--ranks \S+/, `--ranks ${[...chosen.ranks].sort((a, b) => a - b).join(",")}`);
    redraw("timeline");
  });
  window.addEventListener("beforeprint", toPaper);
  // Later: Firefox does not end printing while a page that is printed changes its charts.
  window.addEventListener("afterprint", () => setTimeout(toScreen, 0));

  // A link to a finding inside something folded opens it.
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let around = target?.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
  });
})();
