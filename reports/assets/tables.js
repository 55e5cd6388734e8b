// Sorting: a heading's button sorts its column, first the largest numbers (or the first letters), then the other way.
// A cell's data-v is its number; cells without a value stay at the end in both directions.
"use strict";
(() => {
  const compareText = new Intl.Collator(undefined, { numeric: true }).compare;

  function keyOf(cell, numeric) {
    if (numeric) return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
    return cell.querySelector(".absent") ? null : cell.textContent.trim();
  }

  function sort(heading) {
    const table = heading.closest("table");
    const column = heading.cellIndex;
    const body = table.tBodies[0];
    const numeric = heading.classList.contains("n");
    const first = numeric && column > 0 ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    const direction = heading.getAttribute("aria-sort") === first ? second : first;
    const sign = direction === "ascending" ? 1 : -1;
    const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[column], numeric) }));
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      return sign * (numeric ? a.key - b.key : compareText(a.key, b.key));
    });
    body.append(...rows.map((entry) => entry.row));
    for (const other of heading.parentNode.cells) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", direction);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("table.sortable thead button");
    if (button) sort(button.closest("th"));
  });
})();
