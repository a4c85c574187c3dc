// The map of tokens and layers: a band for an answer, or three for two of them and where they differ.

import { GUTTER, bar, layerNumbers, outline, paint, sized, ticks } from "./canvas.js";
import { ink, ramps } from "./colours.js";
import { visible } from "./tokens.js";

const AXIS = 20;
const GAP = 10;

export class TokenMap {
  constructor(element, view, select) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.spacer = element.querySelector(".spacer");
    this.view = view;
    this.zoom = null; // width of a token in pixels, where it was chosen by hand; "fit": all tokens are in sight
    this.hover = null;
    this.following = false; // whether to keep the end in sight
    const hover = (cell) => {
      this.hover = cell;
      view.changed();
    };
    element.addEventListener("scroll", () => view.changed());
    element.addEventListener("pointermove", (event) => hover(this.#at(event)));
    element.addEventListener("pointerleave", () => hover(null));
    element.addEventListener("click", (event) => {
      const cell = this.#at(event);
      if (cell) select(cell);
    });
  }

  /** Positions of both answers. */
  get #length() {
    const { a, b } = this.view;
    return Math.max(a.tokens.length, a.end, b?.end ?? 0, b?.tokens.length ?? 0, 1);
  }

  /** What is drawn one below the other: each answer, and where they differ. */
  get #bands() {
    const { a, b, comparison, rank } = this.view;
    const { unknown, experts, differs } = ramps();
    const bands = [a, b].filter(Boolean).map((answer, i) => {
      const { start, end, rows, size, topK } = answer;
      const colours = experts(answer.experts);
      const place = Math.min(rank, topK) - 1;
      const colour = (layer, position) => {
        const id = rows[(position - start) * size + layer * topK + place];
        return id < 0 ? unknown : colours[id];
      };
      return { name: "AB"[i], answer, start, end, colour };
    });
    if (!comparison) return bands;
    const { start, end } = comparison;
    const colour = (layer, first, end) => differs[Math.round(255 * comparison.share(layer, first, end))];
    return [...bands, { name: "≠", answer: null, start, end, colour }];
  }

  /** The width of a token in pixels. */
  get cellWidth() {
    const room = this.element.clientWidth - GUTTER - 2;
    if (this.zoom === "fit") return Math.min(room / this.#length, 18);
    return this.zoom ?? Math.min(Math.max(room / this.#length, 2), 18);
  }

  get #layerHeight() {
    const { a, b } = this.view;
    return Math.max(b ? 3 : 4, Math.min(26, Math.floor((b ? 210 : 340) / a.layers)));
  }

  setZoom(width) {
    const middle = this.element.clientWidth / 2;
    const at = (this.element.scrollLeft + middle - GUTTER) / this.cellWidth;
    this.zoom = width;
    this.#spread();
    this.element.scrollLeft = at * this.cellWidth - middle + GUTTER;
    this.view.changed();
  }

  /** Scrolls so that a position can be seen. */
  reveal(position) {
    const cell = this.cellWidth;
    const left = position * cell;
    const room = this.element.clientWidth - GUTTER;
    this.#spread();
    if (left < this.element.scrollLeft) this.element.scrollLeft = left - room / 3;
    else if (left + cell > this.element.scrollLeft + room) this.element.scrollLeft = left - (2 * room) / 3;
  }

  #spread() {
    const { a, b, comparison } = this.view;
    const bands = 1 + Boolean(b) + Boolean(comparison);
    this.spacer.style.width = `${GUTTER + this.#length * this.cellWidth + 2}px`;
    this.spacer.style.height = `${AXIS + bands * (a.layers * this.#layerHeight) + (bands - 1) * GAP + 4}px`;
  }

  #at(event) {
    const { a, b } = this.view;
    if (!a) return null;
    const box = this.element.getBoundingClientRect();
    const x = event.clientX - box.left - GUTTER;
    const band = a.layers * this.#layerHeight;
    const y = event.clientY - box.top - AXIS;
    const within = b ? y % (band + GAP) : y;
    const token = Math.floor((x + this.element.scrollLeft) / this.cellWidth);
    const layer = Math.floor(within / this.#layerHeight);
    if (x < 0 || y < 0 || layer < 0 || layer >= a.layers || token < 0 || token >= this.#length) return null;
    return { token, layer };
  }

  draw() {
    const { a, b, token, layer } = this.view;
    this.#spread();
    if (this.following && this.view.growing) this.element.scrollLeft = this.element.scrollWidth;
    const { clientWidth: width, scrollLeft } = this.element;
    const [cell, tall] = [this.cellWidth, this.#layerHeight];
    const height = a.layers * tall;
    const context = sized(this.canvas, width, parseFloat(this.spacer.style.height));
    const from = scrollLeft / cell;
    const to = Math.min(from + (width - GUTTER) / cell, this.#length);
    this.#axis(context, from, to, cell);
    this.#bands.forEach(({ name, answer, start, end, colour }, i) => {
      const top = AXIS + i * (height + GAP);
      layerNumbers(context, a, layer, top, tall);
      context.textAlign = "left";
      context.fillStyle = ink("text");
      if (b) context.fillText(name, 1, top + 7);
      context.save();
      context.beginPath();
      context.rect(GUTTER, top, width - GUTTER, height);
      context.clip();
      context.translate(GUTTER - scrollLeft, top); // to where position 0 and layer 0 begin
      context.fillStyle = ink("empty");
      context.fillRect(scrollLeft, 0, (to - from) * cell, height);
      paint(context, Math.max(from, start), Math.min(to, end), cell, a.layers, tall, colour);
      if (answer) this.#boundary(context, answer, cell, height);
      if (answer) this.#chosen(context, answer, from, to, cell, tall);
      this.#cross(context, token, layer, cell, tall, "select", 2);
      if (this.hover) this.#cross(context, this.hover.token, this.hover.layer, cell, tall, "muted", 1);
      context.restore();
    });
  }

  #axis(context, from, to, cell) {
    const { a } = this.view;
    context.textBaseline = "alphabetic";
    if (cell >= 14) {
      context.fillStyle = ink("text");
      context.textAlign = "center";
      for (let i = Math.floor(from); i < to; i++) context.fillText(visible(a.text(i)).slice(0, cell >= 22 ? 4 : 2), GUTTER + (i - from + 0.5) * cell, AXIS - 6, cell);
      return;
    }
    context.fillStyle = ink("muted");
    context.textAlign = "left";
    for (const at of ticks(from, to, (this.element.clientWidth - GUTTER) / 70)) {
      const x = GUTTER + (at - from) * cell;
      context.fillRect(x, AXIS - 5, 1, 5);
      context.fillText(String(at), x + 3, AXIS - 6);
    }
  }

  /** The end of the prompt. */
  #boundary(context, { promptLength }, cell, height) {
    if (!promptLength) return;
    const x = promptLength * cell;
    context.fillStyle = ink("surface");
    context.fillRect(x - 1.5, 0, 3, height);
    context.fillStyle = ink("text");
    for (let y = 0; y < height; y += 6) context.fillRect(x - 0.5, y, 1, 3);
  }

  /** Marks the tokens that chose the selected expert, in its layer. */
  #chosen(context, answer, from, to, cell, tall) {
    const { layer, expert } = this.view;
    if (expert === null) return;
    const mark = Math.max(2, tall / 4);
    context.fillStyle = ink("select");
    for (let i = Math.floor(from); i < to; i++) {
      if (answer.cell(i, layer).includes(expert)) context.fillRect(i * cell, (layer + 1) * tall - mark, Math.max(cell, 1), mark);
    }
  }

  #cross(context, token, layer, cell, tall, colour, width) {
    const box = [token * cell, layer * tall, Math.max(cell, 3), tall];
    outline(context, [token * cell - width / 2, 0, Math.max(cell, 1) + width, this.view.a.layers * tall], ink(colour), width);
    outline(context, box, ink("surface"), 3);
    outline(context, box, ink(colour), 1.5);
  }

  /** Draws the legend, and says it in words. */
  legend(canvas, text, differs) {
    const { a, comparison } = this.view;
    bar(canvas, ramps().experts(Math.min(a.experts, 120)));
    text.textContent = `a colour for each expert of a layer, 0 to ${a.experts - 1}; grey: unknown`;
    differs.hidden = !comparison;
    bar(differs.querySelector("canvas"), ramps().differs);
  }
}
