// The map as a table, some tokens at a time.

import { made } from "./dom.js";
import { capital, visible } from "./tokens.js";

const ROWS = 25;

export class MapTable {
  constructor(details, view) {
    this.details = details;
    this.view = view;
    this.table = details.querySelector("table");
    this.range = details.querySelector("#table-range");
    this.first = 0;
    details.addEventListener("toggle", () => this.show(view.token));
    details.querySelector("#table-back").addEventListener("click", () => this.show(this.first - ROWS));
    details.querySelector("#table-on").addEventListener("click", () => this.show(this.first + ROWS));
  }

  /** Shows the page with a position on it. */
  show(position) {
    const { a } = this.view;
    if (!a || !this.details.open) return;
    const last = Math.max(a.tokens.length, a.end) - 1;
    this.first = Math.floor(Math.min(Math.max(position, 0), Math.max(last, 0)) / ROWS) * ROWS;
    const end = Math.min(this.first + ROWS, last + 1);
    this.range.textContent = `tokens ${this.first} to ${end - 1} of ${last + 1}`;
    this.table.replaceChildren();
    const head = this.table.createTHead().insertRow();
    for (const title of ["Position", "Token", ...a.layerIds.map((_, i) => capital(a.layerName(i)))]) head.append(made("th", { scope: "col" }, title));
    const body = this.table.createTBody();
    for (let i = this.first; i < end; i++) this.#row(body.insertRow(), a, i);
  }

  #row(row, answer, position) {
    row.append(made("th", { scope: "row" }, String(position)));
    row.insertCell().textContent = visible(answer.text(position));
    for (let layer = 0; layer < answer.layers; layer++) {
      row.insertCell().textContent = answer.cellInWords(position, layer);
    }
  }
}
