// A table, some rows at a time.

import { made } from "./dom.js";

const ROWS = 25;

export class PagedTable {
  /** `element` has a frame with a table, and a pager. `pick(i)` is called for a row that is clicked. */
  constructor(element, pick) {
    this.first = 0;
    this.frame = element.querySelector(".scroll");
    this.table = this.frame.firstElementChild;
    this.pager = element.querySelector(".pager");
    [this.back, this.on, this.range] = this.pager.children;
    this.back.addEventListener("click", () => this.show(this.first - ROWS));
    this.on.addEventListener("click", () => this.show(this.first + ROWS));
    this.table.addEventListener("click", ({ target }) => {
      const row = target.closest("tbody tr");
      if (row) pick(Number(row.dataset.row));
    });
  }

  /** There are `count` rows now, of which `cells(i)` gives what the cells have: a text, or a list of texts and elements. */
  fill(titles, count, cells) {
    Object.assign(this, { titles, count, cells, first: -1 });
  }

  /** Shows the page with row `place`. */
  show(place) {
    const first = Math.floor(Math.max(Math.min(place, this.count - 1), 0) / ROWS) * ROWS;
    if (first === this.first) return;
    const end = Math.min(first + ROWS, this.count);
    this.first = first;
    this.frame.scrollTop = 0;
    this.table.replaceChildren();
    const head = this.table.createTHead().insertRow();
    for (const title of this.titles) head.append(made("th", { scope: "col" }, title));
    const body = this.table.createTBody();
    for (let i = first; i < end; i++) {
      const row = body.insertRow();
      row.dataset.row = i;
      const [name, ...cells] = this.cells(i);
      row.append(made("th", { scope: "row" }, made("button", { type: "button", className: "link" }, name)));
      for (const cell of cells) row.insertCell().append(...[cell].flat());
    }
    this.back.disabled = !first;
    this.on.disabled = end >= this.count;
    this.range.textContent = this.count ? `${first + 1} to ${end} of ${this.count}` : "none";
    this.pager.hidden = this.count <= ROWS;
  }
}
