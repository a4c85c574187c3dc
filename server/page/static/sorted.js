// A table that can be sorted by each column, some rows at a time.

import { saveCsv } from "./download.js";

const ROWS = 25;
const ROOM = 24; // pixels beyond a row that is brought into sight

export class SortedTable {
  /**
   * `pick(row)` is called for a row that is clicked. A click on a column is kept in `view.sorts` by the name that `list()`
   * gives: the column's key, with a minus where the highest comes first.
   */
  constructor(element, label, view, list, pick) {
    Object.assign(this, { pick, first: 0, rows: [], columns: [] });
    this.table = document.createElement("table");
    this.scroll = made("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: label }, this.table);
    this.back = made("button", { type: "button" }, "Previous");
    this.on = made("button", { type: "button" }, "Next");
    this.range = made("span", { className: "muted" });
    this.pager = made("div", { className: "row pager" }, this.back, this.on, this.range);
    element.append(this.scroll, this.pager);
    this.back.addEventListener("click", () => this.#go(this.first - ROWS));
    this.on.addEventListener("click", () => this.#go(this.first + ROWS));
    this.table.addEventListener("click", (event) => {
      const [head, row] = [event.target.closest("thead button"), event.target.closest("tbody tr")];
      if (head) {
        view.sorts[list()] = this.#toggled(this.columns[head.dataset.column]);
        view.changed();
      } else if (row) this.pick(this.rows[Number(row.dataset.row)]);
    });
  }

  /**
   * `columns` = [{key, title, value(row), text(row) or digits, csv(row), rises: whether the lowest comes first}];
   * `key` says what the rows are: other ones, or others that come first, are shown from the first on.
   */
  show(columns, rows, sort, key) {
    const [name, falls] = sort.startsWith("-") ? [sort.slice(1), true] : [sort, false];
    const by = columns.find((column) => column.key === name) ?? columns[0];
    this.rows = sortedBy(rows, by.value, falls);
    Object.assign(this, { columns, sorted: { by: by.key, falls } });
    if (`${sort} ${key}` !== this.key) this.first = 0;
    this.key = `${sort} ${key}`;
    this.#build();
  }

  #toggled({ key, rises }) {
    const { by, falls } = this.sorted;
    return (by === key ? falls : rises) ? key : `-${key}`;
  }

  #go(first) {
    this.first = Math.max(Math.floor(Math.min(first, this.rows.length - 1) / ROWS) * ROWS, 0);
    this.scroll.scrollTop = 0;
    this.#build();
  }

  #build() {
    const { rows, columns, first } = this;
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    this.table.replaceChildren();
    const head = this.table.createTHead().insertRow();
    columns.forEach(({ key, title }, i) => {
      const isBy = key === this.sorted.by;
      const button = made("button", { type: "button", className: "sort" }, title, isBy ? (this.sorted.falls ? " ▼" : " ▲") : "");
      button.dataset.column = i;
      const cell = made("th", { scope: "col" }, button);
      if (isBy) cell.ariaSort = this.sorted.falls ? "descending" : "ascending";
      head.append(cell);
      if (String(i) === focused) button.focus();
    });
    const body = this.table.createTBody();
    const end = Math.min(first + ROWS, rows.length);
    for (let i = first; i < end; i++) {
      const row = body.insertRow();
      row.dataset.row = i;
      columns.forEach((column, place) => {
        const shown = textOf(column, rows[i]);
        row.insertCell().append(...(place ? [shown].flat() : [made("button", { type: "button", className: "link" }, shown)]));
      });
    }
    this.back.disabled = !first;
    this.on.disabled = end >= rows.length;
    this.range.textContent = rows.length ? `${first + 1} to ${end} of ${rows.length}` : "none";
    this.pager.hidden = rows.length <= ROWS;
    this.mark(this.isSelected);
  }

  /** Marks the rows that are selected; goes to the first of them if `isRevealed`. */
  mark(isSelected, isRevealed = false) {
    this.isSelected = isSelected;
    if (!isSelected) return;
    const place = isRevealed ? this.rows.findIndex(isSelected) : -1;
    if (place >= 0 && Math.floor(place / ROWS) * ROWS !== this.first) return this.#go(place);
    for (const row of this.table.tBodies[0]?.rows ?? []) {
      const isIt = isSelected(this.rows[Number(row.dataset.row)]);
      row.classList.toggle("selected", isIt);
      if (isIt && isRevealed) reveal(row, this.scroll);
    }
  }

  /** All rows, in their order. */
  saveCsv(name) {
    const header = this.columns.flatMap(({ key, names }) => names ?? key);
    saveCsv(header, this.rows.map((row) => this.columns.flatMap(({ csv, value }) => (csv ?? value)(row))), name);
  }
}

/** An element with properties and children. */
export function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Scrolls a frame, and nothing around it, so that a row of its table can be seen below the header. */
export function reveal(row, frame) {
  const [box, around] = [row.getBoundingClientRect(), frame.getBoundingClientRect()];
  const top = around.top + (frame.querySelector("thead")?.offsetHeight ?? 0);
  if (box.top < top) frame.scrollTop -= top - box.top + ROOM;
  else if (box.bottom > around.bottom - ROOM) frame.scrollTop += box.bottom - around.bottom + ROOM;
}

function textOf({ value, text, digits = 0 }, row) {
  if (text) return text(row);
  const found = value(row);
  return found === null || Number.isNaN(found) ? "" : typeof found === "number" ? found.toFixed(digits) : found;
}

/** Unknown values come last, whichever way. */
function sortedBy(rows, value, falls) {
  const isUnknown = (found) => found === null || Number.isNaN(found);
  const order = (one, other) => {
    if (isUnknown(one) || isUnknown(other)) return isUnknown(one) - isUnknown(other);
    const by = typeof one === "string" ? one.localeCompare(other) : one - other;
    return falls ? -by : by;
  };
  return rows.map((row) => [value(row), row]).sort(([one], [other]) => order(one, other)).map(([, row]) => row);
}
