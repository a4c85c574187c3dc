// Pairs of experts as a matrix: chosen together in the selected layer, or one there and one in the layer after it.

import { GUTTER, bar, outline, sized, ticks } from "./canvas.js";
import { ink, ramps } from "./colours.js";
import { SortedTable } from "./sorted.js";
import { lift, pairsOf } from "./stats.js";

const MOST = 560; // pixels
const MOST_EXPERTS = 1024; // more need too much memory
const TOP = 4; // times what is independent, at the ramp's end

export class Matrix {
  constructor(element, table, view, select) {
    Object.assign(this, { element, view });
    this.canvas = element.querySelector("canvas");
    this.picture = document.createElement("canvas");
    this.hover = null;
    const at = (event) => this.#at(event);
    element.addEventListener("click", (event) => at(event) && select(at(event)));
    element.addEventListener("pointermove", (event) => this.#hover(at(event)));
    for (const kind of ["pointerleave", "keydown"]) element.addEventListener(kind, () => this.#hover(null));
    const pick = ({ i, j }) => select({ layer: view.layer, expert: i, other: j });
    this.table = new SortedTable(table, "Pairs of experts", view, () => "pairs", pick);
    table.addEventListener("toggle", () => view.changed());
    this.details = table;
  }

  get #isWithin() {
    return this.view.pairs === "together";
  }

  /** The layer of the columns; null for the last layer's transitions, and where there is no matrix. */
  get #to() {
    const { a, layer } = this.view;
    if (a.experts > MOST_EXPERTS) return null;
    if (this.#isWithin) return layer;
    return layer + 1 < a.layers ? layer + 1 : null;
  }

  get #side() {
    return Math.max(Math.min(this.element.clientWidth - GUTTER - 2, MOST), 60);
  }

  #at(event) {
    if (!this.view.a || this.#to === null) return null;
    const { a, layer } = this.view;
    const box = this.canvas.getBoundingClientRect();
    const place = (at) => Math.floor(((at - GUTTER) / this.#side) * a.experts);
    const [i, j] = [place(event.clientY - box.top), place(event.clientX - box.left)];
    return [i, j].every((at) => at >= 0 && at < a.experts) ? { layer, expert: i, other: j } : null;
  }

  #hover(cell) {
    this.hover = cell;
    this.view.changed();
  }

  /** Draws anew even if nothing grew. */
  forget() {
    this.paints = null;
  }

  draw() {
    const { a, layer, expert, other, pairs, shade, sorts } = this.view;
    const of = [a.length, layer, pairs].join();
    if (of !== this.counted || a !== this.of) {
      this.found = this.#to === null ? null : pairsOf(a, layer, this.#to);
      Object.assign(this, { counted: of, of: a, paints: null, lists: null });
    }
    const paints = [shade, expert, other, this.#side].join();
    if (paints !== this.paints) this.#paint();
    this.paints = paints;
    const lists = [this.details.open, sorts.pairs].join();
    if (lists !== this.lists && this.details.open) this.#list();
    this.lists = lists;
    this.table.mark((row) => row.i === expert && row.j === other, false);
  }

  #paint() {
    const { a, shade, expert, other } = this.view;
    const side = this.#side;
    const context = sized(this.canvas, GUTTER + side + 2, GUTTER + side + 2);
    if (!this.found) return;
    const { counts } = this.found;
    Object.assign(this.picture, { width: a.experts, height: a.experts });
    const image = new ImageData(a.experts, a.experts);
    const pixels = new Uint32Array(image.data.buffer);
    const { load, unknown } = ramps();
    let most = 1;
    for (let i = 0, at = 0; i < a.experts; i++) for (let j = 0; j < a.experts; j++, at++) if (i !== j || !this.#isWithin) most = Math.max(most, counts[at]);
    for (let i = 0, at = 0; i < a.experts; i++) {
      for (let j = 0; j < a.experts; j++, at++) {
        const share = shade === "lift" ? lift(this.found, i, j) / TOP : counts[at] / most;
        pixels[at] = i === j && this.#isWithin ? unknown : load[Math.round(255 * Math.min(Math.sqrt(share), 1))];
      }
    }
    this.picture.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = a.experts > side;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.picture, GUTTER, GUTTER, side, side);
    this.#labels(context, side);
    this.#chosen(context, expert, other, side / a.experts);
    this.most = most;
  }

  #labels(context, side) {
    const { experts } = this.view.a;
    context.fillStyle = ink("muted");
    const middle = (at) => GUTTER + ((at + 0.5) * side) / experts;
    for (const at of ticks(0, experts - 1, side / 40)) {
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(String(at), GUTTER - 5, middle(at));
      context.textAlign = "center";
      context.textBaseline = "alphabetic";
      context.fillText(String(at), middle(at), GUTTER - 6);
    }
    context.textAlign = "left";
    context.fillText(this.#isWithin ? "expert" : "from ↓ to →", 0, 11);
  }

  /** The selected expert's row, and the selected pair. */
  #chosen(context, i, j, cell) {
    if (i === null) return;
    const tall = Math.max(cell, 2);
    outline(context, [GUTTER - 1, GUTTER + i * cell - 1, this.#side + 2, tall + 2], ink("select"), 1.5);
    if (j !== null) outline(context, [GUTTER + j * cell - 1, GUTTER - 1, tall + 2, this.#side + 2], ink("select"), 1.5);
  }

  /** The pairs that were chosen; together, each once. */
  *#pairs() {
    const { experts } = this.view.a;
    const { counts, left } = this.found;
    for (let i = 0; i < experts; i++) {
      for (let j = this.#isWithin ? i + 1 : 0; j < experts; j++) {
        const count = counts[i * experts + j];
        if (count) yield { i, j, count, share: count / left[i], lift: lift(this.found, i, j) };
      }
    }
  }

  #list() {
    const percent = (value) => `${(100 * value).toFixed(1)} %`;
    const columns = [
      { key: "expert", title: this.#isWithin ? "Expert" : "From expert", value: ({ i }) => i, rises: true },
      { key: "other", title: this.#isWithin ? "With expert" : "To expert", value: ({ j }) => j, rises: true },
      { key: "tokens", title: "Tokens", value: ({ count }) => count },
      { key: "share", title: "Of the first's", value: ({ share }) => share, text: ({ share }) => percent(share) },
      { key: "lift", title: "Times independent", value: ({ lift }) => lift, digits: 2 },
    ];
    this.table.show(columns, this.found ? [...this.#pairs()] : [], this.view.sorts.pairs ?? "-tokens", this.counted);
  }

  saveCsv(name) {
    if (!this.found) return;
    this.#list();
    this.table.saveCsv(name);
  }

  /** The pair under the pointer, or the selected one, in words. */
  words() {
    const { a, layer, expert, other } = this.view;
    if (a.experts > MOST_EXPERTS) return `Pairs are shown of up to ${MOST_EXPERTS} experts.`;
    if (this.#to === null) return `${a.layerName(layer)} is the last one.`;
    if (!this.found) return "";
    const pair = this.hover ?? { expert, other };
    const { expert: i, other: j } = pair;
    const { counts, left, tokens } = this.found;
    const where = this.#isWithin ? `Within ${a.layerName(layer)}` : `From ${a.layerName(layer)} to ${a.layerName(this.#to)}`;
    if (i === null || j === null) return `${where}: ${tokens} tokens. Select a pair of experts.`;
    const count = counts[i * a.experts + j];
    if (this.#isWithin && i === j) return `${where}: ${count} of ${tokens} tokens chose expert ${i}.`;
    const both = this.#isWithin ? `experts ${i} and ${j}` : `expert ${i}, then ${j}`;
    const share = left[i] ? ` (${((100 * count) / left[i]).toFixed(1)} % of those of expert ${i})` : "";
    return `${where}: ${count} of ${tokens} tokens chose ${both}${share}, ${lift(this.found, i, j).toFixed(2)} × as many as if independent.`;
  }

  legend(canvas, text) {
    bar(canvas, ramps().load);
    const within = this.#isWithin ? "; grey: the same expert" : "";
    text.textContent = `${this.view.shade === "lift" ? `from 0 to at least ${TOP} times what independent choices would give` : "from no token to the most of a pair"}${within}`;
    this.forget();
  }
}
