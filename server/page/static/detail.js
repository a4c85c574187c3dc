// One token in full: the experts of every layer, and those of the answer beside it.

import { css, ramps } from "./colours.js";
import { differing } from "./compare.js";
import { made, reveal } from "./dom.js";
import { weightText } from "./tokens.js";

export class Detail {
  constructor(table, select) {
    this.table = table;
    table.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-layer]");
      if (!cell) return;
      const expert = cell.className.startsWith("chip") ? parseInt(cell.textContent) : NaN;
      select({ layer: Number(cell.dataset.layer), expert: Number.isNaN(expert) ? null : expert });
    });
  }

  /** A table with a row for each layer. */
  build({ a, b }) {
    this.table.replaceChildren();
    this.layer = null;
    this.table.style.setProperty("--digits", String(a.experts - 1).length);
    const head = this.table.createTHead().insertRow();
    for (const title of [a.knowsLayers ? "Decoder layer" : "MoE layer", b ? "Experts of A" : "Experts", ...(b ? ["Experts of B", "Differ"] : [])]) {
      head.append(made("th", { scope: "col" }, title));
    }
    const body = this.table.createTBody();
    this.rows = a.layerIds.map((id, layer) => {
      const row = body.insertRow();
      const name = made("th", { scope: "row" }, String(id));
      name.dataset.layer = layer;
      row.append(name);
      const sides = [a, ...(b ? [b] : [])].map((answer) => chips(row.insertCell(), answer, layer));
      return { row, sides, differ: b && row.insertCell(), shows: null };
    });
  }

  /** Fills in what changed. */
  draw({ a, b, token, layer, expert }) {
    const colours = ramps().experts(a.experts);
    const known = [a, b].map((answer) => Boolean(answer) && token >= answer.start && token < answer.end);
    this.rows.forEach((entry, at) => {
      const shows = `${token} ${known} ${at === layer ? `${expert} here` : ""} ${colours[0]}`;
      if (entry.shows === shows) return;
      entry.shows = shows;
      const here = [a.cell(token, at), b?.cell(token, at)];
      entry.row.classList.toggle("selected", at === layer);
      entry.sides.forEach((cells, side) => {
        fill(cells, here[side], here[1 - side], colours, at === layer ? expert : null);
        const { weights } = side ? b : a;
        if (weights) weigh(cells, (side ? b : a).cell(token, at, weights));
      });
      if (entry.differ) entry.differ.textContent = here[0].length && here[1].length ? differing(...here) || "" : "";
    });
    if (layer !== this.layer) reveal(this.rows[layer].row, this.table.parentElement);
    this.layer = layer;
  }
}

function chips(cell, { topK, weights }, layer) {
  cell.className = weights ? "experts weighed" : "experts";
  const chips = Array.from({ length: topK }, () => made("span", { className: "chip" }, "", ...(weights ? [made("small", {})] : [])));
  for (const chip of chips) chip.dataset.layer = layer;
  cell.append(made("div", { className: "chips" }, ...chips));
  return chips;
}

/** Shows ids; those that the other answer has not are marked. */
function fill(cells, ids, others, colours, expert) {
  cells.forEach((chip, k) => {
    const id = ids[k] ?? null;
    const isKnown = id !== null && id >= 0;
    const relation = !others?.length || !isKnown ? "" : others.includes(id) ? " same" : " differs";
    set(chip.firstChild, "data", isKnown ? String(id) : id === null ? "–" : "?");
    set(chip, "className", `chip${relation}${isKnown && id === expert ? " chosen" : ""}`);
    chip.style.borderLeftColor = isKnown ? css(colours[id]) : "transparent";
  });
}

function weigh(cells, weights) {
  cells.forEach((chip, k) => set(chip.lastChild, "textContent", k < weights.length ? ` ${Number.isNaN(weights[k]) ? "?" : weightText(weights[k])}` : ""));
}

/** Touches the document only where something changes. */
function set(element, property, value) {
  if (element[property] !== value) element[property] = value;
}
