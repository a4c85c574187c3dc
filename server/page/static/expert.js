// The tokens that chose the selected expert, of both answers: the largest weights first, or the first choices.

import { made } from "./dom.js";
import { quoted, saveCsv } from "./download.js";
import { PagedTable } from "./pages.js";
import { flat, visible, weightText } from "./tokens.js";

const AROUND = 4; // tokens before and after one
const REST = 600; // milliseconds between two drawings while an answer grows

/** What rows {answer, side, position, rank, weight} show. */
const COLUMNS = {
  position: { title: "Position", cell: ({ position }) => String(position) },
  token: { title: "Token in its context", cell: contextOf },
  rank: { title: "Rank", cell: ({ rank }) => String(rank) },
  weight: { title: "Weight", cell: ({ weight }) => (Number.isNaN(weight) ? "" : weightText(weight)) },
  side: { title: "In", cell: ({ side }) => side },
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
    Object.assign(this, { element, view });
    this.table = new PagedTable(element, (i) => {
      const { answer, position } = this.rows[i];
      if (answer === view.a || view.comparison) select({ token: position });
    });
  }

  /** Shows what has changed: other tokens from the first on, and the page that has the selected one. */
  draw() {
    const { a, b, layer, expert, token, comparison, growing } = this.view;
    this.element.hidden = expert === null;
    const list = [a.name, b?.name, layer, expert].join();
    const shows = [list, a.length, b?.length].join();
    const isOther = list !== this.list || a !== this.of;
    const hasMoved = token !== this.token;
    if (!isOther && ((shows === this.shows && !hasMoved) || (growing && performance.now() - this.drawn < REST))) return;
    const { first } = this.table;
    if (isOther || shows !== this.shows) this.#find();
    const isSelected = ({ answer, position }) => position === token && (answer === a || Boolean(comparison));
    const place = hasMoved ? this.rows.findIndex(isSelected) : -1;
    this.table.show(place >= 0 ? place : isOther ? 0 : first);
    this.table.mark((i) => isSelected(this.rows[i]));
    if (place >= 0) this.table.reveal(place);
    Object.assign(this, { list, shows, of: a, token, drawn: performance.now() });
  }

  #find() {
    const { a, b, layer, expert } = this.view;
    const sides = b ? { A: a, B: b } : { A: a };
    const found = Object.entries(sides).flatMap(([side, answer]) => (expert === null ? [] : tokensOf(answer, side, layer, expert)));
    this.rows = found.sort((one, other) => (other.weight || 0) - (one.weight || 0) || one.rank - other.rank);
    this.columns = Object.keys(COLUMNS).filter((name) => (name !== "weight" || a.weights || b?.weights) && (name !== "side" || b));
    const cells = (i) => this.columns.map((name) => COLUMNS[name].cell(this.rows[i]));
    this.table.fill(this.columns.map((name) => COLUMNS[name].title), this.rows.length, cells);
  }

  /** Saves all tokens, in their order. */
  saveCsv(name) {
    const header = this.columns.flatMap((column) => (column === "token" ? ["token", "token_id"] : column));
    const texts = ({ answer, position }) => [quoted(answer.text(position)), answer.tokens[position]?.id];
    saveCsv(header, this.rows.map((row) => this.columns.flatMap((column) => (column === "token" ? texts(row) : row[column]))), name);
  }
}
