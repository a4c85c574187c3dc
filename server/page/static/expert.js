// The tokens that chose the selected expert, of both answers: a list that can be sorted by each column.

import { made, reveal } from "./dom.js";
import { quoted, saveCsv } from "./download.js";
import { flat, visible, weightText } from "./tokens.js";

const ROWS = 25; // on a page
const AROUND = 4; // tokens before and after one
const REST = 600; // milliseconds between two drawings while an answer grows

/** Of rows {answer, position, rank, weight, side}. `rises`: the lowest comes first at first. */
const COLUMNS = {
  position: { title: "Position", value: ({ position }) => position, rises: true },
  token: { title: "Token in its context", value: ({ answer, position }) => answer.text(position), shown: contextOf, rises: true },
  rank: { title: "Rank", value: ({ rank }) => rank, rises: true },
  weight: { title: "Weight", value: ({ weight }) => weight, shown: ({ weight }) => (Number.isNaN(weight) ? "" : weightText(weight)) },
  side: { title: "In", value: ({ side }) => side, rises: true },
};

function contextOf({ answer, position }) {
  const around = (first, end) => {
    let words = "";
    for (let i = Math.max(first, 0); i < Math.min(end, answer.tokens.length); i++) words += flat(answer.text(i));
    return words;
  };
  const mark = made("mark", {}, visible(answer.text(position)));
  return [around(position - AROUND, position), mark, around(position + 1, position + 1 + AROUND)];
}

/** The tokens of an answer that chose an expert. `weight` is NaN where it is unknown. */
function tokensOf(answer, side, layer, expert) {
  const found = [];
  for (let position = answer.start; position < answer.end; position++) {
    const place = answer.cell(position, layer).indexOf(expert);
    const weight = answer.weights ? answer.cell(position, layer, answer.weights)[place] : NaN;
    if (place >= 0) found.push({ answer, side, position, rank: place + 1, weight });
  }
  return found;
}

export class ExpertTokens {
  constructor(element, view, select) {
    Object.assign(this, { element, view, first: 0, rows: [], columns: [] });
    [this.scroll, this.pager] = element.children;
    [this.back, this.on, this.range] = this.pager.children;
    this.table = this.scroll.firstElementChild;
    this.back.addEventListener("click", () => this.#go(this.first - ROWS));
    this.on.addEventListener("click", () => this.#go(this.first + ROWS));
    this.table.addEventListener("click", ({ target }) => {
      const [head, row] = [target.closest("thead button"), target.closest("tbody tr")];
      if (head) {
        view.sort = this.#toggled(head.dataset.column);
        view.changed();
      } else if (row) {
        const { answer, position } = this.rows[Number(row.dataset.row)];
        if (answer === view.a || view.comparison) select({ token: position });
      }
    });
  }

  /** Shows what has changed: other tokens from the first on, and the page that has the selected one. */
  draw() {
    const { a, b, layer, expert, token, sort } = this.view;
    this.element.hidden = expert === null;
    const list = [a.name, b?.name, layer, expert, sort].join();
    const shows = [list, a.length, b?.length].join();
    const isOther = list !== this.list || a !== this.of;
    const isNew = isOther || shows !== this.shows;
    if (!isOther && this.view.growing && performance.now() - this.drawn < REST) return;
    const hasMoved = token !== this.token;
    Object.assign(this, { list, shows, of: a, token, drawn: performance.now() });
    if (isNew) this.#find();
    const place = hasMoved ? this.rows.findIndex((row) => this.#isSelected(row)) : -1;
    const page = pageOf(place < 0 && !isOther ? this.first : place);
    if (isNew || page !== this.first) this.#build(page);
    else if (hasMoved) this.#mark();
    if (hasMoved && place >= 0) reveal(this.table.tBodies[0].rows[place - this.first], this.scroll);
  }

  #find() {
    const { a, b, layer, expert, sort } = this.view;
    const sides = b ? { A: a, B: b } : { A: a };
    const found = Object.entries(sides).flatMap(([side, answer]) => (expert === null ? [] : tokensOf(answer, side, layer, expert)));
    const hasWeights = Boolean(a.weights || b?.weights);
    this.columns = Object.keys(COLUMNS).filter((name) => (name !== "weight" || hasWeights) && (name !== "side" || b));
    const [, falls, name] = /^(-?)(.*)$/.exec(sort ?? (a.hasWeights ? "-weight" : "rank"));
    this.by = this.columns.includes(name) ? name : "position";
    this.falls = falls === "-";
    this.rows = sorted(found, COLUMNS[this.by].value, this.falls);
  }

  #toggled(name) {
    const falls = this.by === name ? !this.falls : !COLUMNS[name].rises;
    return falls ? `-${name}` : name;
  }

  #isSelected({ answer, position }) {
    const { a, token, comparison } = this.view;
    return position === token && (answer === a || Boolean(comparison));
  }

  #go(first) {
    this.scroll.scrollTop = 0;
    this.#build(pageOf(Math.min(first, this.rows.length - 1)));
  }

  #build(first) {
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    this.first = first;
    this.table.replaceChildren();
    const head = this.table.createTHead().insertRow();
    for (const name of this.columns) {
      const sign = name === this.by ? (this.falls ? " ▼" : " ▲") : "";
      const button = made("button", { type: "button", className: "sort" }, COLUMNS[name].title, sign);
      button.dataset.column = name;
      const cell = made("th", { scope: "col" }, button);
      if (sign) cell.ariaSort = this.falls ? "descending" : "ascending";
      head.append(cell);
      if (name === focused) button.focus();
    }
    const body = this.table.createTBody();
    const end = Math.min(first + ROWS, this.rows.length);
    this.rows.slice(first, end).forEach((found, i) => {
      const row = body.insertRow();
      row.dataset.row = first + i;
      this.columns.forEach((name, place) => {
        const { value, shown = value } = COLUMNS[name];
        const words = [shown(found)].flat();
        row.insertCell().append(...(place ? words : [made("button", { type: "button", className: "link" }, ...words)]));
      });
    });
    this.back.disabled = !first;
    this.on.disabled = end >= this.rows.length;
    this.range.textContent = this.rows.length ? `${first + 1} to ${end} of ${this.rows.length}` : "none";
    this.pager.hidden = this.rows.length <= ROWS;
    this.#mark();
  }

  #mark() {
    for (const row of this.table.tBodies[0].rows) row.classList.toggle("selected", this.#isSelected(this.rows[Number(row.dataset.row)]));
  }

  /** Saves all tokens, in their order. */
  saveCsv(name) {
    const header = this.columns.flatMap((column) => (column === "token" ? ["token", "token_id"] : column));
    const fields = (row) => this.columns.flatMap((column) => (column === "token" ? tokenFields(row) : COLUMNS[column].value(row)));
    saveCsv(header, this.rows.map(fields), name);
  }
}

const pageOf = (place) => Math.floor(Math.max(place, 0) / ROWS) * ROWS;

const tokenFields = ({ answer, position }) => [quoted(answer.text(position)), answer.tokens[position]?.id];

/** In order of a value; unknown ones come last, whichever way. */
function sorted(rows, value, falls) {
  const order = (one, other) => {
    if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other);
    const by = typeof one === "string" ? one.localeCompare(other) : one - other;
    return falls ? -by : by;
  };
  return rows.map((row) => [value(row), row]).sort(([one], [other]) => order(one, other)).map(([, row]) => row);
}
