"use strict";
// Sort a table by a column: ascending first, then descending; cells without a number stay last, ties keep their order.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? (ascending ? "ascending" : "descending") : "none"));
      const numeric = head.classList.contains("number");
      const value = (row) => {
        const cell = row.cells[column];
        if (!numeric) return cell.textContent;
        return "v" in cell.dataset ? Number(cell.dataset.v) : null;
      };
      const sign = ascending ? 1 : -1;
      const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}
// Light or dark: what the system says, until the reader chooses; a browser that keeps nothing for files forgets it.
const root = document.documentElement;
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const kept = (() => { try { return localStorage.getItem("fiberdp-theme"); } catch { return null; } })();
if (kept === "light" || kept === "dark") root.dataset.theme = kept;
const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
const label = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", "Switch to " + (dark() ? "light" : "dark") + " colours"); };
button.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  try { localStorage.setItem("fiberdp-theme", root.dataset.theme); } catch { /* not kept */ }
  label();
});
system.addEventListener("change", label);
button.hidden = false;
label();
