// One token in full: the experts of every layer, and those of the answer beside it.

import { css, ramps } from "./colours.js";
import { differing } from "./compare.js";
import { made, reveal } from "./dom.js";
import { weightText } from "./tokens.js";

export class Detail {
  constructor(table, select) {
    this.table = table;
    table.addEventListener("click", (event) => {
      const row = event.target.closest("[data-layer]");
      if (!row) return;
      const expert = parseInt(event.target.closest(".chip")?.textContent);
      select({ layer: Number(row.dataset.layer), expert: Number.isNaN(expert) ? null : expert });
    });
  }

  /** A table with a row for each layer. */
  build({ a, b }) {
    this.table.replaceChildren();
    this.layer = null;
    this.table.style.setProperty("--digits", String(a.experts - 1).length);
    const titles = [a.knowsLayers ? "Decoder layer" : "MoE layer", ...(b ? ["Experts of A", "Experts of B", "Differ"] : ["Experts"])];
    const head = titles.map((title) => made("th", { scope: "col" }, title));
    this.table.createTHead().insertRow().append(...head);
    const body = this.table.createTBody();
    this.rows = a.layerIds.map((id, layer) => {
      const row = body.insertRow();
      row.append(made("th", { scope: "row" }, String(id)));
      row.dataset.layer = layer;
      const sides = [a, ...(b ? [b] : [])].map((answer) => chips(row.insertCell(), answer));
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
      entry.sides.forEach((chips, side) => {
        const { weights } = side ? b : a;
        const beside = weights && (side ? b : a).cell(token, at, weights);
        fill(chips, here[side], beside, here[1 - side], colours, at === layer ? expert : null);
      });
      if (entry.differ) entry.differ.textContent = here[0].length && here[1].length ? differing(...here) || "" : "";
    });
    if (layer !== this.layer) reveal(this.rows[layer].row, this.table.parentElement);
    this.layer = layer;
  }
}

function chips(cell, { topK, weights }) {
  cell.className = weights ? "experts weighed" : "experts";
  const chips = Array.from({ length: topK }, () => made("span", { className: "chip" }, "", ...(weights ? [made("small", {})] : [])));
  cell.append(made("div", { className: "chips" }, ...chips));
  return chips;
}

/** Shows ids and their weights; ids that the other answer has not are marked. */
function fill(chips, ids, weights, others, colours, expert) {
  chips.forEach((chip, k) => {
    const id = ids[k] ?? null;
    const isKnown = id !== null && id >= 0;
    const relation = !others?.length || !isKnown ? "" : others.includes(id) ? " same" : " differs";
    chip.firstChild.data = isKnown ? String(id) : id === null ? "–" : "?";
    const name = `chip${relation}${isKnown && id === expert ? " chosen" : ""}`;
    if (chip.className !== name) chip.className = name;
    chip.style.borderLeftColor = isKnown ? css(colours[id]) : "transparent";
    if (weights) chip.lastChild.textContent = id === null ? "" : ` ${Number.isNaN(weights[k]) ? "?" : weightText(weights[k])}`;
  });
}
