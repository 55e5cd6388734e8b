// The page by keyboard: Tab goes from section to section, arrows move inside one (up and down from part to part, left and
// right within it), so that nobody tabs through every heading of every table. On a chart, left and right go through its
// values, which are shown and read aloud.
"use strict";
(() => {
  const FOCUSABLE = "a[href], button, input, summary, [tabindex]";
  const OWN_STOPS = "select, #timeline-tools input"; // Arrows have a meaning in them.
  const PART = "h2, h3, p, summary, ul, .tiles, .choice, .typed, .scroll";
  const groups = [...document.querySelectorAll("[data-keys]")];
  const spoken = document.getElementById("spoken");

  const scrolls = (element) => element.matches(".scroll") && (element.scrollWidth > element.clientWidth || element.scrollHeight > element.clientHeight);
  const stopsOf = (group) => [...group.querySelectorAll(FOCUSABLE)].filter((each) => !each.matches(OWN_STOPS));
  const seen = (element) => element.checkVisibility();
  const partOf = (element) => element.closest(PART) ?? element;

  // One element of each group is reached by Tab; a table that scrolls is, too.
  function settle(group) {
    const all = stopsOf(group);
    const current = all.find((each) => each === document.activeElement) ?? all.find((each) => each.tabIndex === 0 && !scrolls(each) && seen(each)) ?? all.find(seen);
    for (const each of all) each.tabIndex = each === current || scrolls(each) ? 0 : -1;
  }

  function move(group, from, key) {
    const all = stopsOf(group).filter(seen);
    const at = all.indexOf(from);
    const forward = key === "ArrowDown" || key === "ArrowRight";
    const part = partOf(from);
    const along = forward ? all.slice(at + 1) : all.slice(0, at).reverse();
    if (key === "ArrowLeft" || key === "ArrowRight") return along.find((each) => partOf(each) === part);
    const next = along.find((each) => partOf(each) !== part);
    return next && all.find((each) => partOf(each) === partOf(next)); // The first of its part.
  }

  // Every value of the visible traces: of a heat map, every cell.
  function valuesOf(place) {
    return place.data.flatMap((trace, curveNumber) => {
      if (trace.visible === false || trace.hoverinfo === "skip") return [];
      if (trace.z) return trace.z.flatMap((row, y) => row.flatMap((value, x) => (value === null ? [] : [{ xval: trace.x[x], yval: y }])));
      return Array.from(trace.y ?? trace.x, (_, pointNumber) => ({ curveNumber, pointNumber })).filter(({ pointNumber: at }) => trace.x?.[at] != null && trace.y?.[at] != null);
    });
  }

  function say(place) {
    const lines = [...place.querySelectorAll(".hoverlayer .hovertext :is(text, tspan)")].filter((each) => !each.children.length);
    spoken.textContent = lines.map((each) => each.textContent).join(" ");
  }

  const at = new WeakMap();
  function nextValue(place, by) {
    const values = valuesOf(place);
    if (!values.length) return;
    const index = Math.min(Math.max((at.get(place) ?? (by > 0 ? -1 : values.length)) + by, 0), values.length - 1);
    at.set(place, index);
    Plotly.Fx.hover(place, values[index].xval === undefined ? [values[index]] : values[index], "xy");
    setTimeout(say, 80, place); // Plotly shows at most one value in 50 ms.
  }

  document.addEventListener("keydown", (event) => {
    const group = event.target.closest("[data-keys]");
    if (!group || !event.key.startsWith("Arrow") || event.ctrlKey || event.metaKey || event.altKey || event.target.matches(OWN_STOPS)) return;
    const isSideways = event.key === "ArrowLeft" || event.key === "ArrowRight";
    if (isSideways && event.target.matches("input[type=search]")) return;
    event.preventDefault();
    if (isSideways && event.target.matches(".plot")) nextValue(event.target, event.key === "ArrowRight" ? 1 : -1);
    else move(group, event.target, event.key)?.focus();
  });
  document.addEventListener("focusin", (event) => {
    const group = event.target.closest("[data-keys]");
    if (group && !event.target.matches(OWN_STOPS)) settle(group);
  });
  document.addEventListener("toggle", () => groups.forEach(settle), { capture: true });
  groups.forEach(settle);
})();
