// The experts of the selected layer and their tokens; or the selected expert's tokens, one by one.

import { $, made } from "./dom.js";
import { quoted, saveCsv } from "./download.js";
import { numArrivals } from "./names.js";
import { PagedTable } from "./pages.js";
import { flat, visible, weightText } from "./tokens.js";
import { loadsByWeight } from "./view.js";

const TYPICAL = 4; // texts of tokens, beside an expert
const AROUND = 4; // tokens before and after one
const REST = 600; // milliseconds between two drawings while an answer grows

/** Of the selected expert: what rows {answer, side, position, rank, weight} show; the last two only where there are weights. */
const COLUMNS = {
  position: { title: "Position", cell: ({ position }) => String(position) },
  token: { title: "Token in its context", cell: contextOf },
  rank: { title: "Rank", cell: ({ rank }) => String(rank ?? "") },
  weight: { title: "Weight", cell: ({ weight }) => (weight === null || Number.isNaN(weight) ? "" : weightText(weight)) },
  side: { title: "In", cell: ({ side }) => side },
};

function contextOf({ answer, position }) {
  const around = (first, end) => Array.from({ length: end - first }, (_, i) => flat(answer.text(first + i))).join("");
  return [around(position - AROUND, position), made("mark", {}, flat(answer.text(position))), around(position + 1, position + 1 + AROUND)];
}

/** The tokens of an answer that chose an expert. `rank` and `weight` are null without weights. */
function tokensOf(answer, side, layer, expert) {
  const found = [];
  for (let position = answer.start; position < answer.end; position++) {
    const choice = answer.choiceOf(position, layer, expert);
    if (choice) found.push({ answer, side, position, rank: choice.rank, weight: choice.weight });
  }
  return found;
}

/** The experts of a layer, the busiest first or, of two answers, those whose loads differ most. */
function expertsOf(answers, layer, byWeight) {
  const count = Math.max(...answers.map(({ experts }) => experts));
  const loads = (expert) => answers.map((answer) => answer.load(layer, expert, byWeight));
  const found = Array.from({ length: count }, (_, expert) => ({ expert, loads: loads(expert) }));
  const size = ({ loads: [one, other] }) => (other === undefined ? one : Math.abs(one - other));
  return found.sort((one, other) => size(other) - size(one));
}

/** How many tokens with known experts have a text, and how often it chose each expert of a layer: [text, {count, chose}]. */
function textsOf(answers, layer) {
  const texts = new Map();
  for (const answer of answers) {
    for (let position = answer.start; position < answer.end; position++) {
      const [text, ids] = [answer.text(position), answer.cell(position, layer)];
      if (!text || ids.includes(-1)) continue;
      const entry = texts.get(text) ?? { count: 0, chose: new Map() };
      texts.set(text, entry);
      entry.count++;
      for (const id of ids) entry.chose.set(id, (entry.chose.get(id) ?? 0) + 1);
    }
  }
  return [...texts];
}

/** The texts that chose an expert most often beyond the `share` of all tokens that did. */
function typical(texts, expert, share) {
  const found = texts.map(([text, { count, chose }]) => ({ text, count, times: chose.get(expert) ?? 0 }));
  const beyond = ({ count, times }) => times - share * count;
  const most = found.filter((entry) => beyond(entry) > 0).sort((one, other) => beyond(other) - beyond(one));
  const shown = ({ text, count, times }) => [made("code", {}, visible(text)), ` ${times}/${count}`];
  return most.slice(0, TYPICAL).map((entry) => made("span", { className: "typical" }, ...shown(entry)));
}

export class Experts {
  constructor(element, view, select) {
    this.view = view;
    this.table = new PagedTable(element, (i) => {
      const { expert, answer, position } = this.rows[i];
      if (!answer) select({ layer: view.layer, expert });
      else if (answer === view.a || view.comparison) select({ token: position });
    });
  }

  /** Shows what has changed: other rows from the first on. */
  draw() {
    const { a, b, layer, expert, growing } = this.view;
    const list = [a.name, b?.name, layer, expert, loadsByWeight()].join();
    const shows = [list, a.length, b?.length, numArrivals].join();
    const isOther = list !== this.list || a !== this.of;
    if (!isOther && (shows === this.shows || (growing && performance.now() - this.drawn < REST))) return;
    const { first } = this.table;
    if (expert === null) this.#listExperts();
    else this.#listTokens();
    this.table.show(isOther ? 0 : first);
    for (const id of ["all-experts", "save-expert"]) $(id).hidden = expert === null;
    $("expert-how").hidden = expert !== null;
    Object.assign(this, { list, shows, of: a, drawn: performance.now() });
  }

  #listExperts() {
    const { a, b, layer } = this.view;
    const answers = [a, b].filter(Boolean);
    this.rows = expertsOf(answers, layer, loadsByWeight());
    const most = Math.max(...this.rows.flatMap(({ loads }) => loads));
    const texts = textsOf(answers, layer);
    const rows = answers.reduce((sum, { slots, topK }) => sum + slots[layer] / topK, 0); // that are known
    const meter = (load) => made("span", { className: "meter", style: `--share: ${load / most}` }, `${load.toFixed(2)} ×`);
    const tokens = (expert) => typical(texts, expert, answers.reduce((sum, answer) => sum + answer.count(layer, expert), 0) / rows);
    const cells = (i) => [String(this.rows[i].expert), ...this.rows[i].loads.map(meter), tokens(this.rows[i].expert)];
    this.table.fill(["Expert", ...(b ? ["Load in A", "Load in B"] : ["Load"]), "Tokens it is chosen for"], this.rows.length, cells);
  }

  #listTokens() {
    const { a, b, layer, expert } = this.view;
    const sides = b ? { A: a, B: b } : { A: a };
    const found = Object.entries(sides).flatMap(([side, answer]) => tokensOf(answer, side, layer, expert));
    this.rows = found.sort((one, other) => (other.weight || 0) - (one.weight || 0));
    const hasWeights = Boolean(a.weights || b?.weights);
    this.columns = Object.keys(COLUMNS).filter((name) => (hasWeights || !["rank", "weight"].includes(name)) && (name !== "side" || b));
    const cells = (i) => this.columns.map((name) => COLUMNS[name].cell(this.rows[i]));
    this.table.fill(this.columns.map((name) => COLUMNS[name].title), this.rows.length, cells);
  }

  /** Saves the selected expert's tokens, in their order. */
  saveCsv(name) {
    const header = this.columns.flatMap((column) => (column === "token" ? ["token", "token_id"] : column));
    const texts = ({ answer, position }) => [quoted(answer.text(position)), answer.tokens[position]?.id];
    saveCsv(header, this.rows.map((row) => this.columns.flatMap((column) => (column === "token" ? texts(row) : row[column]))), name);
  }
}
