// Draws every chart the page has a place for, and draws again when the look changes: light or dark, screen or paper.
"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 600;
  const PAPER_WIDTH = 680;

  function currentLook() {
    const style = getComputedStyle(root);
    const value = (name) => style.getPropertyValue(name).trim();
    const colours = Object.fromEntries(data.categories.map(({ name }) => [name, value(`--c-${name}`)]));
    const [text, muted, line, page, raised] = ["--text", "--muted", "--line", "--page", "--raised"].map(value);
    const narrow = root.clientWidth < NARROW;
    return { colours, text, muted, line, page, raised, narrow, font: getComputedStyle(document.body).fontFamily };
  }

  function draw(width) {
    const look = currentLook();
    for (const place of document.querySelectorAll(".plot")) {
      const name = place.id.slice("chart-".length);
      const [traces, layout] = figures[name](data, look);
      if (width) layout.width = width;
      Plotly.react(place, traces, layout, {
        responsive: !width,
        displaylogo: false,
        displayModeBar: false,
        doubleClick: "reset",
      });
    }
    root.dataset.charts = "drawn";
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
    draw(PAPER_WIDTH);
  }

  function toScreen() {
    root.classList.remove("paper");
    for (const details of opened.splice(0)) details.open = false;
    draw();
  }

  draw();
  dark.addEventListener("change", () => draw());
  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", toScreen);

  // A link to a finding inside something folded opens it.
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    target?.closest("details")?.setAttribute("open", "");
  });
})();
