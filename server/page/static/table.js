// The map as a table.

import { PagedTable } from "./pages.js";
import { capital, visible } from "./tokens.js";

export class MapTable {
  constructor(details, view) {
    Object.assign(this, { details, view, table: new PagedTable(details) });
    details.addEventListener("toggle", () => this.show(view.token));
  }

  /** Shows the page with a position on it. */
  show(position) {
    const { a } = this.view;
    if (!a || !this.details.open) return;
    const titles = ["Position", "Token", ...a.layerIds.map((_, layer) => capital(a.layerName(layer)))];
    const cells = (i) => [String(i), visible(a.text(i)), ...a.layerIds.map((_, layer) => a.cellInWords(i, layer))];
    this.table.fill(titles, Math.max(a.tokens.length, a.end), cells);
    this.table.show(position);
  }
}
