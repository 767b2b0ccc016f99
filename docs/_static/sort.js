// A click on a heading sorts the table of Track 0 by this column.
document.addEventListener("DOMContentLoaded", () => {
  for (const heading of document.querySelectorAll("#the-table thead th")) {
    heading.tabIndex = 0;
    heading.title = "Sort by this column";
    const sort = () => {
      const table = heading.closest("table");
      const column = heading.cellIndex;
      const falling = heading.ariaSort === "ascending";
      for (const other of table.querySelectorAll("th")) other.ariaSort = null;
      heading.ariaSort = falling ? "descending" : "ascending";
      // Empty cells come last. A minus sign of typography is one of arithmetic.
      const key = (row) => {
        const text = row.cells[column].textContent.trim().replace(/−/g, "-").replace(/,/g, "");
        return [text === "", parseFloat(text), text];
      };
      const compare = (a, b) => {
        const [emptyA, numberA, textA] = key(a), [emptyB, numberB, textB] = key(b);
        if (emptyA || emptyB) return emptyA - emptyB;
        const order = isNaN(numberA) || isNaN(numberB) ? textA.localeCompare(textB) : numberA - numberB;
        return falling ? -order : order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  }
});
