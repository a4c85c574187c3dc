// The experts of a token: of every layer in a table, of the layer under the pointer in a box.

import { css } from "./colours.js";
import { differing } from "./compare.js";
import { $, made, reveal } from "./dom.js";
import { capital, weightText } from "./tokens.js";
import { describe } from "./words.js";

const AROUND = 6; // layers before and after the selected one, in the box

export class Detail {
  constructor(table, select) {
    this.table = table;
    table.addEventListener("click", ({ target }) => {
      const row = target.closest("[data-layer]");
      if (!row) return;
      const { expert } = target.closest(".chip")?.dataset ?? {};
      select({ layer: Number(row.dataset.layer), expert: expert === undefined ? null : Number(expert) });
      if (expert !== undefined) $("expert-title").scrollIntoView({ block: "nearest" }); // on a phone it is elsewhere
    });
  }

  /** Shows the token that is selected, beside that of the answer which is compared with by position. */
  draw(view) {
    const { a, comparison, token, layer, expert, busiest } = view;
    const b = comparison && view.b;
    const known = [a, b].map((answer) => Boolean(answer) && token >= answer.start && token < answer.end);
    const shows = [a.name, b?.name, token, layer, expert, known, busiest.rows, busiest.colour(0, 0)].join();
    if (shows === this.shows && a === this.of) return;
    const hasMoved = layer !== this.layer || a !== this.of;
    Object.assign(this, { shows, layer, of: a });
    this.table.style.setProperty("--digits", String(a.experts - 1).length);
    const titles = [capital(a.layerKind), ...(b ? ["Experts of A", "Experts of B", "Differ"] : ["Experts"])];
    const head = made("thead", {}, made("tr", {}, ...titles.map((title) => made("th", { scope: "col" }, title))));
    const rows = a.layerIds.map((_, at) => rowOf(view, b, at));
    this.table.replaceChildren(head, made("tbody", {}, ...rows));
    if (hasMoved) reveal(rows[layer], this.table.parentElement);
  }
}

function rowOf({ a, token, layer, expert, busiest }, b, at) {
  const sides = b ? [a, b] : [a];
  const cells = sides.map((answer, i) => made("td", {}, chips(answer, token, at, busiest, sides[1 - i], at === layer ? expert : null)));
  const row = made("tr", { className: at === layer ? "selected" : "" }, made("th", { scope: "row" }, String(a.layerIds[at])), ...cells);
  row.dataset.layer = at;
  if (b) row.insertCell().textContent = (b.cell(token, at).length && differing(a.cell(token, at), b.cell(token, at))) || "";
  return row;
}

/** The experts of a cell; those that the other answer has not are marked. */
function chips(answer, token, layer, busiest, other, expert) {
  const choices = answer.choices(token, layer);
  const others = other?.cell(token, layer);
  const chip = (_, k) => {
    const { id, weight } = choices[k] ?? { id: null, weight: null };
    const isKnown = id !== null && id >= 0;
    const relation = !others?.length || !isKnown ? "" : others.includes(id) ? " same" : " differs";
    const className = `chip${relation}${isKnown && id === expert ? " chosen" : ""}`;
    const style = isKnown ? `border-left-color: ${css(busiest.colour(layer, id))}` : "";
    const element = made("span", { className, style }, isKnown ? String(id) : id === null ? "–" : "?");
    if (isKnown) element.dataset.expert = id;
    if (answer.weights) element.append(made("small", {}, id === null ? "" : ` ${Number.isNaN(weight) ? "?" : weightText(weight)}`));
    return element;
  };
  return made("div", { className: answer.weights ? "chips weighed" : "chips" }, ...Array.from({ length: answer.topK }, chip));
}

/** For the box beside the pointer: a token's experts in one layer, or in those around the selected one. */
export function tipOf(view, answer, token, layer = null) {
  const [a, b] = view.comparison ? [view.a, view.b] : [answer, null];
  const first = layer ?? Math.max(Math.min(view.layer - AROUND, a.layers - 2 * AROUND - 1), 0);
  const end = layer === null ? Math.min(first + 2 * AROUND + 1, a.layers) : layer + 1;
  const rows = a.layerIds.slice(first, end).map((_, i) => rowOf({ ...view, a, token }, b, first + i));
  const heads = [capital(a.layerKind), ...(b ? ["A", "B", "Differ"] : ["Experts"])].map((title) => made("th", {}, title));
  return [made("strong", {}, describe(answer, token)), made("table", {}, made("tr", {}, ...heads), ...rows)];
}
