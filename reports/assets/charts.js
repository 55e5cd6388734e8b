// Draws every chart the page has a place for, and draws again when the look changes: light or dark, screen or paper.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 600;
  const PAPER_WIDTH = 680;

  function currentLook() {
    const style = getComputedStyle(root);
    const value = (name) => style.getPropertyValue(name).trim();
    const colours = Object.fromEntries(data.categories.map(({ name }) => [name, value(`--c-${name}`)]));
    const [text, muted, line, page, raised] = ["--text", "--muted", "--line", "--page", "--raised"].map(value);
    const narrow = root.clientWidth < NARROW;
    const body = getComputedStyle(document.body);
    // Labels grow with the page's text on very wide screens.
    const size = Math.round(0.8 * parseFloat(body.fontSize));
    return { colours, text, muted, line, page, raised, narrow, size, font: body.fontFamily };
  }

  let data; // Unpacked, as Plotly, after the first screen is painted: it can be read and used before.
  const checked = [...document.querySelectorAll("#timeline-ranks input:checked")];
  const chosen = { sort: "rank", ranks: new Set(checked.map((box) => Number(box.value))) }; // The reader's choices.

  const places = [...document.querySelectorAll(".plot")];
  const pending = new Set(places);

  async function load() {
    const plotly = unpack("plotly").arrayBuffer();
    data = await unpack("data").json();
    const script = document.createElement("script");
    script.src = URL.createObjectURL(new Blob([await plotly], { type: "text/javascript" }));
    await new Promise((resolve, reject) => {
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error("plotly did not start")));
      document.head.append(script);
    });
    URL.revokeObjectURL(script.src);
  }

  function drawOne(place, width) {
    pending.delete(place);
    const [name, index] = place.id.slice("chart-".length).split("-");
    const [traces, layout] = figures[name](data, { ...currentLook(), chosen }, Number(index));
    if (width) layout.width = width;
    Plotly.react(place, traces, layout, {
      responsive: !width,
      displaylogo: false,
      displayModeBar: false,
      doubleClick: "reset",
    });
  }

  function finished() {
    if (root.dataset.charts === "drawn") return;
    root.dataset.charts = "drawn";
    performance.mark("perfscope-all");
  }

  function drawAll(width) {
    if (!window.Plotly) return; // What is loading is drawn in the look that there is then.
    for (const place of places) drawOne(place, width);
    finished();
  }

  function redraw(name) {
    const place = document.getElementById(`chart-${name}`);
    if (place && window.Plotly) drawOne(place);
  }

  // How far from the screen a chart's place is, in screens; 0 on it.
  function distance(place) {
    const box = place.getBoundingClientRect();
    return Math.max(box.top - window.innerHeight, -box.bottom, 0) / window.innerHeight;
  }

  // One chart after the other, always the one nearest to what the reader looks at; in between the page answers.
  function drawNext() {
    const nearest = [...pending].map((place) => [distance(place), place]).sort((a, b) => a[0] - b[0])[0];
    const isFirst = performance.getEntriesByName("perfscope-first").length === 0;
    if (isFirst && (!nearest || nearest[0] > 0.5)) performance.mark("perfscope-first");
    if (!nearest) return finished();
    drawOne(nearest[1]);
    setTimeout(drawNext, 0);
  }

  // What is folded on the screen is shown on paper, but for tables of thousands of rows.
  const opened = [];
  function toPaper() {
    root.classList.add("paper");
    for (const details of document.querySelectorAll("details:not([open])")) {
      if (details.querySelectorAll("tr").length > 100) continue;
      details.open = true;
      opened.push(details);
    }
    drawAll(PAPER_WIDTH);
  }

  function toScreen() {
    root.classList.remove("paper");
    for (const details of opened.splice(0)) details.open = false;
    drawAll();
  }

  // After the first paint; a page in a hidden tab is not painted, and is drawn all the same.
  let begun = false;
  const begin = () => {
    if (begun) return;
    begun = true;
    load().then(drawNext, (error) => {
      for (const place of places) place.textContent = `This browser cannot draw the charts (${error.message}). Use a browser from 2023 or later.`;
    });
  };
  requestAnimationFrame(() => setTimeout(begin, 0));
  setTimeout(begin, 300);
  dark.addEventListener("change", () => drawAll());
  document.getElementById("breakdown-sort")?.addEventListener("change", (event) => {
    chosen.sort = event.target.value;
    redraw("breakdown");
  });
  document.getElementById("timeline-ranks")?.addEventListener("change", (event) => {
    const rank = Number(event.target.value);
    if (event.target.checked) chosen.ranks.add(rank);
    else chosen.ranks.delete(rank);
    redraw("timeline");
  });
  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", toScreen);

  // A link to a finding inside something folded opens it.
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let around = target?.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
  });
})();
