// Tables: sort, filter, take away as CSV. Sorting: a heading's button sorts its column, first the largest numbers (or the first letters), then the other way.
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

  // As in RFC 4180. A number goes out in full, as it is held, not as it is rounded for the screen; a text that a
  // spreadsheet would take for a formula is kept from being one.
  function csvField(cell) {
    if (cell.dataset.v !== undefined) return cell.dataset.v;
    const text = cell.querySelector(".absent") ? "" : cell.textContent.replace(/\s+/g, " ").trim();
    const harmless = /^[=+\-@\t]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(harmless) ? `"${harmless.replace(/"/g, '""')}"` : harmless;
  }

  // A heading with the unit in which numbers are held: times are µs, sizes bytes, shares 0 to 1.
  function csvHeading(heading) {
    const label = heading.querySelector("button");
    const held = heading.dataset.held;
    const name = label.firstChild.textContent.trim() + (held ? ` (${held})` : "");
    return /[",]/.test(name) ? `"${name}"` : name;
  }

  function csv(table) {
    const lines = [Array.from(table.tHead.rows[0].cells, csvHeading)];
    for (const row of table.tBodies[0].rows) if (!row.hidden) lines.push(Array.from(row.cells, csvField));
    return lines.map((fields) => `${fields.join(",")}\r\n`).join("");
  }

  function save(table) {
    const link = document.createElement("a");
    // The mark tells spreadsheets that it is UTF-8.
    link.href = URL.createObjectURL(new Blob(["\ufeff", csv(table)], { type: "text/csv" }));
    link.download = `${table.id}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  // Every word must be in the row.
  function filter(table, sought, told) {
    const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    told.textContent = words.length ? `${shown} of ${table.tBodies[0].rows.length} rows` : "";
  }

  document.addEventListener("input", (event) => {
    const tools = event.target.closest(".tools[data-table]");
    if (tools) filter(document.getElementById(tools.dataset.table), event.target.value, tools.querySelector("output"));
  });

  document.addEventListener("click", (event) => {
    const tools = event.target.closest("button.csv")?.closest(".tools");
    if (tools) save(document.getElementById(tools.dataset.table));
    const button = event.target.closest("table.sortable thead button");
    if (button) sort(button.closest("th"));
  });
})();
