// The timeline as one works in it: zoom and move by keyboard (as in Perfetto), wheel, fingers and buttons; search; names
// in the bars as they get room.
"use strict";
(() => {
  const place = document.getElementById("chart-timeline");
  if (!place) return;
  const tools = document.getElementById("timeline-tools");
  const [field, told] = [tools.querySelector("input"), tools.querySelector("output")];
  const LETTER = 7; // Pixels, about.
  const LEAST_LETTERS = 8; // Of a name that is cut: fewer say nothing.
  const FAINT = 0.12;
  let whole; // The range of the whole step.
  let matches = [];
  let current = -1;

  const range = () => place.layout.xaxis.range ?? whole;
  const nameOf = (text) => text.split(/<b>|<\/b>/)[1];
  const width = () => place._fullLayout.xaxis._length;

  function show(from, to) {
    const length = Math.min(Math.max(to - from, (whole[1] - whole[0]) / 1e6), whole[1] - whole[0]);
    const start = Math.min(Math.max(from, whole[0]), whole[1] - length);
    return Plotly.relayout(place, { "xaxis.range": [start, start + length], "xaxis.autorange": false });
  }

  // Around a place from 0, the left edge of the view, to 1.
  function zoom(factor, at = 0.5) {
    const [from, to] = range();
    const length = (to - from) * factor;
    const start = from + (to - from - length) * at;
    return show(start, start + length);
  }

  function move(part) {
    const [from, to] = range();
    return show(from + (to - from) * part, to + (to - from) * part);
  }

  const KEYS = {
    w: () => zoom(0.6),
    s: () => zoom(1 / 0.6),
    a: () => move(-0.25),
    d: () => move(0.25),
    0: () => show(...whole),
  };

  const where = (x) => (x - place.querySelector(".nsewdrag").getBoundingClientRect().left) / width();

  // What a trace shows in the view: its names as far as they have room, and what was not searched for is faint.
  function adapted(trace) {
    const [from, to] = range();
    const letters = width() / (to - from) / LETTER;
    const text = trace.customdata.map((content, i) => {
      const [start, end] = [Math.max(trace.base[i], from), Math.min(trace.base[i] + trace.x[i], to)];
      const most = Math.floor((end - start) * letters);
      const name = nameOf(content);
      return name.length <= most ? name : most < LEAST_LETTERS ? "" : `${name.slice(0, most - 1)}…`;
    });
    const sought = field.value.trim().toLowerCase();
    const opacity = trace.customdata.map((content, i) => {
      if (sought && !content.toLowerCase().includes(sought)) return FAINT;
      return trace.usual?.[i] ?? 1;
    });
    return { text, opacity };
  }

  const bars = () => place.data.map((trace, index) => ({ trace, index })).filter(({ trace }) => trace.customdata && trace.visible);

  // Where to look in Perfetto, whose file begins with the same step.
  function tellPlace() {
    const [from, to] = range();
    const unit = place.layout.xaxis.title.text.split(" ")[0];
    const digits = Math.max(0, 2 - Math.floor(Math.log10(to - from)));
    const isAll = to - from > 0.99 * (whole[1] - whole[0]);
    document.querySelector("#in-perfetto output").textContent = isAll ? "" : `This view is ${from.toFixed(digits)} to ${to.toFixed(digits)} ${unit} after the step's start.`;
  }

  let waiting = 0;
  function adapt() {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      tellPlace();
      const shown = bars();
      const made = shown.map(({ trace }) => adapted(trace));
      Plotly.restyle(place, { text: made.map((one) => one.text), "marker.opacity": made.map((one) => one.opacity) }, shown.map(({ index }) => index));
    }, 80);
  }

  function search() {
    const sought = field.value.trim().toLowerCase();
    current = -1;
    matches = [];
    for (const { trace } of sought ? bars() : []) {
      if (trace.legendgroup === "wait") continue; // The same collective as its transfer.
      trace.customdata.forEach((content, i) => {
        if (content.toLowerCase().includes(sought)) matches.push([trace.base[i], trace.x[i]]);
      });
    }
    matches.sort((a, b) => a[0] - b[0]);
    told.textContent = sought ? `${matches.length} found` : "";
    adapt();
  }

  function next() {
    if (!matches.length) return;
    current = (current + 1) % matches.length;
    const [start, length] = matches[current];
    const around = Math.max(length * 4, (whole[1] - whole[0]) / 50);
    told.textContent = `${current + 1} of ${matches.length}`;
    show(start + length / 2 - around / 2, start + length / 2 + around / 2);
  }

  place.addEventListener("drawn", () => {
    if (!whole) {
      whole = [0, place._fullLayout.xaxis.range[1]];
      place.tabIndex = 0;
      place.setAttribute("role", "group");
      place.on("plotly_relayout", adapt);
    }
    // Kept beside what the search makes of it.
    for (const { trace } of bars()) trace.usual ??= trace.marker.opacity;
    search();
  });
  place.addEventListener("keydown", (event) => {
    const act = !event.ctrlKey && !event.metaKey && !event.altKey && KEYS[event.key.toLowerCase()];
    if (act) act();
  });
  // The page scrolls under the pointer; the chart zooms where the reader asks for it.
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== place) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / width());
    else zoom(1.002 ** event.deltaY, where(event.clientX));
  }, { passive: false });
  place.addEventListener("pointerdown", () => place.focus({ preventScroll: true }));

  let pinch = null;
  const fingers = (event) => [...event.touches].map((touch) => where(touch.clientX)).sort((a, b) => a - b);
  place.addEventListener("touchmove", (event) => {
    if (event.touches.length !== 2) return;
    event.preventDefault();
    const [left, right] = fingers(event);
    pinch ??= { left, right, view: range() };
    // What was under the fingers stays under them.
    const [from, to] = pinch.view;
    const length = (to - from) * ((pinch.right - pinch.left) / Math.max(right - left, 0.02));
    const start = from + (to - from) * pinch.left - length * left;
    show(start, start + length);
  }, { passive: false, capture: true });
  place.addEventListener("touchend", () => (pinch = null));

  tools.addEventListener("click", (event) => KEYS[event.target.dataset.key]?.());
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => event.key === "Enter" && next());
})();
