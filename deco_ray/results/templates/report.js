"use strict";
(() => {
  const status = document.getElementById("status");
  let clearing = 0;

  const say = (text) => {
    status.textContent = text;
    clearTimeout(clearing);
    clearing = setTimeout(() => { status.textContent = ""; }, 2500);
  };

  const value = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.classList.contains("number") ? null : cell.textContent;
  };

  // missing values stay last in both directions
  const compare = (a, b, direction) => {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return direction * (a - b);
    return direction * String(a).localeCompare(String(b), undefined, { numeric: true });
  };

  for (const button of document.querySelectorAll("button.sort")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const table = head.closest("table");
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const body = table.tBodies[0];
      const direction = order === "ascending" ? 1 : -1;
      const rows = Array.from(body.rows);
      rows.sort((a, b) => compare(value(a, head.cellIndex), value(b, head.cellIndex), direction));
      body.append(...rows);
    });
  }

  // pages opened from a disk may lack the clipboard interface: select and copy the old way
  const copyByHand = (area) => {
    area.hidden = false;
    area.select();
    const done = document.execCommand("copy");
    area.hidden = true;
    return done;
  };

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const what = button.dataset.what;
      const area = button.closest(".table").querySelector(`textarea[data-what="${what}"]`);
      let done = false;
      try {
        await navigator.clipboard.writeText(area.value);
        done = true;
      } catch {
        done = copyByHand(area);
      }
      say(done ? `Table copied as ${what === "latex" ? "LaTeX" : "CSV"}` : "This browser does not allow copying");
    });
  }

  // paper shows everything
  const folded = () => document.querySelectorAll("details:not([open])");
  window.addEventListener("beforeprint", () => {
    for (const each of folded()) { each.open = true; each.dataset.printed = "1"; }
  });
  window.addEventListener("afterprint", () => {
    for (const each of document.querySelectorAll("details[data-printed]")) { each.open = false; delete each.dataset.printed; }
  });
})();
