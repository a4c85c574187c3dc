// The map of tokens and layers: a band for an answer, or three for two of them and where they differ.

import { GUTTER, layerNumbers, outline, paint, scale, sized, ticks } from "./canvas.js";
import { differs, ink, ramps } from "./colours.js";
import { tipOf } from "./detail.js";
import { $ } from "./dom.js";
import { colouring, meaningOf } from "./modes.js";
import { watchPointer } from "./tip.js";
import { visible } from "./tokens.js";

const AXIS = 20;
const GAP = 10;
const STRIP = 28;
const NUMBER = 36; // pixels for a token's number on the axis
const WIDEST = 32; // pixels for a token
const DRAG = 5; // pixels from which on a click is a drag

export class TokenMap {
  constructor(element, view, select) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.spacer = element.querySelector(".spacer");
    this.view = view;
    this.zoom = null; // width of a token in pixels, where it was chosen by hand; "fit": all tokens are in sight
    this.following = false; // whether to keep the end in sight
    element.addEventListener("scroll", () => view.changed());
    element.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    let moved = 0; // pixels that the mouse was dragged; fingers scroll by themselves
    let isInStrip = false;
    element.addEventListener("pointerdown", (event) => {
      moved = 0;
      isInStrip = this.#isInStrip(event);
    });
    element.addEventListener("pointermove", (event) => {
      if (!event.buttons || event.pointerType === "touch") return;
      moved += Math.abs(event.movementX);
      if (isInStrip) this.#goTo(event);
      else element.scrollLeft -= event.movementX;
    });
    element.addEventListener("click", (event) => {
      const cell = this.#at(event);
      if (isInStrip) this.#goTo(event);
      else if (cell && moved < DRAG && (view.comparison || cell.answer === view.a)) select({ token: cell.token, layer: cell.layer });
    });
    watchPointer(element, (event) => {
      const cell = this.#at(event);
      return cell && tipOf(view, cell.answer, cell.token, cell.layer);
    });
  }

  /** Positions of both answers. */
  get #length() {
    const { a, b } = this.view;
    return Math.max(a.tokens.length, a.end, b?.end ?? 0, b?.tokens.length ?? 0, 1);
  }

  /** What is drawn one below the other: each answer, and where they differ. */
  get #bands() {
    const { a, b, comparison } = this.view;
    const colourOf = colouring(this.view);
    const bands = [a, b].filter(Boolean).map((answer, i) => {
      const { start, end } = answer;
      const colour = (layer, first, until) => colourOf(answer, layer, Math.max(first, start), Math.min(until, end));
      return { name: "AB"[i], answer, start, end, colour };
    });
    if (!comparison) return bands;
    const { start, end } = comparison;
    const colour = (layer, first, end) => differs(comparison.share(layer, first, end));
    return [...bands, { name: "≠", answer: null, start, end, colour }];
  }

  /** The width of a token in pixels. */
  get cellWidth() {
    const whole = Math.min(this.#room / this.#length, 18);
    return this.zoom === "fit" ? whole : (this.zoom ?? Math.max(whole, 2));
  }

  get #layerHeight() {
    const { a, b } = this.view;
    return Math.max(b ? 3 : 4, Math.min(26, Math.floor((b ? 210 : 340) / a.layers)));
  }

  /** Makes tokens `width` pixels wide, or "fit". What is at `x` pixels stays there. */
  setZoom(width, x = this.element.clientWidth / 2) {
    const at = (this.element.scrollLeft + x - GUTTER) / this.cellWidth;
    this.zoom = width;
    this.#spread();
    this.element.scrollLeft = at * this.cellWidth - x + GUTTER;
    this.view.changed();
  }

  zoomBy(factor, x) {
    this.setZoom(Math.min(Math.max(this.cellWidth * factor, Math.min(this.#room / this.#length, 1)), WIDEST), x);
  }

  get #room() {
    return this.element.clientWidth - GUTTER - 2;
  }

  /** The positions in sight: from the first to the end, which need not be whole. */
  get #inSight() {
    const from = this.element.scrollLeft / this.cellWidth;
    return [from, Math.min(from + (this.#room + 2) / this.cellWidth, this.#length)];
  }

  /** Whether a strip below shows where in the whole the map is. */
  get #hasStrip() {
    return this.#length * this.cellWidth > this.#room + 1;
  }

  #isInStrip({ clientY }) {
    return this.#hasStrip && clientY > this.element.getBoundingClientRect().top + this.canvas.clientHeight - STRIP;
  }

  /** Brings what the strip shows under the pointer into the middle. */
  #goTo({ clientX }) {
    const share = (clientX - this.element.getBoundingClientRect().left - GUTTER) / this.#room;
    this.element.scrollLeft = share * this.#length * this.cellWidth - this.#room / 2;
  }

  /** With Ctrl, as browsers do with the page, or two fingers on a touchpad, which comes as the same. */
  #wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoomBy(2 ** (-event.deltaY / 200), event.clientX - this.element.getBoundingClientRect().left);
  }

  /** Scrolls so that a position can be seen. */
  reveal(position) {
    const cell = this.cellWidth;
    const left = position * cell;
    const room = this.#room;
    this.#spread();
    if (left < this.element.scrollLeft) this.element.scrollLeft = left - room / 3;
    else if (left + cell > this.element.scrollLeft + room) this.element.scrollLeft = left - (2 * room) / 3;
  }

  #spread() {
    const { a, b, comparison } = this.view;
    const bands = 1 + Boolean(b) + Boolean(comparison);
    this.spacer.style.width = `${GUTTER + this.#length * this.cellWidth + 2}px`;
    this.spacer.style.height = `${AXIS + bands * (a.layers * this.#layerHeight) + (bands - 1) * GAP + 4 + (this.#hasStrip ? STRIP + GAP : 0)}px`;
  }

  #at(event) {
    const { a, b } = this.view;
    if (!a || this.#isInStrip(event)) return null;
    const box = this.element.getBoundingClientRect();
    const x = event.clientX - box.left - GUTTER;
    const band = a.layers * this.#layerHeight;
    const y = event.clientY - box.top - AXIS;
    const within = b ? y % (band + GAP) : y;
    const token = Math.floor((x + this.element.scrollLeft) / this.cellWidth);
    const layer = Math.floor(within / this.#layerHeight);
    if (x < 0 || y < 0 || layer < 0 || layer >= a.layers || token < 0 || token >= this.#length) return null;
    return { token, layer, answer: b && y > band ? b : a };
  }

  draw() {
    const { a, b, comparison, token, layer } = this.view;
    this.#spread();
    if (this.following && this.view.growing) this.element.scrollLeft = this.element.scrollWidth;
    const { clientWidth: width, scrollLeft } = this.element;
    const [cell, tall] = [this.cellWidth, this.#layerHeight];
    const height = a.layers * tall;
    const whole = parseFloat(this.spacer.style.height);
    const context = sized(this.canvas, width, whole);
    const [from, to] = this.#inSight;
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
      if (comparison || answer === a) this.#cross(context, token, layer, cell, tall);
      context.restore();
    });
    if (this.#hasStrip) this.#strip(context, from, to, whole - STRIP);
    $("zoom").value = Math.log2(cell);
  }

  /** The selected layer of the whole answer, or where it differs from the other, and a frame around what is in sight. */
  #strip(context, from, to, top) {
    const { layer, comparison } = this.view;
    const { start, end, colour } = this.#bands.at(comparison ? -1 : 0);
    const cell = this.#room / this.#length;
    context.translate(GUTTER, top);
    paint(context, start, end, cell, 1, STRIP - 2, (_, first, end) => colour(layer, first, end));
    outline(context, [from * cell + 1, 1, Math.max((to - from) * cell - 2, 4), STRIP - 4], ink("text"), 2);
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
    for (const at of ticks(from, to - NUMBER / cell, (this.element.clientWidth - GUTTER) / 70)) {
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
    context.fillStyle = ink("text");
    for (let i = Math.floor(from); i < to; i++) {
      if (answer.cell(i, layer).includes(expert)) context.fillRect(i * cell, (layer + 1) * tall - mark, Math.max(cell, 1), mark);
    }
  }

  #cross(context, token, layer, cell, tall) {
    const [left, colour] = [token * cell, ink("text")];
    outline(context, [left - 1, 0, Math.max(cell, 1) + 2, this.view.a.layers * tall], colour, 2);
    outline(context, [left, layer * tall, Math.max(cell, 3), tall], ink("surface"), 3);
    outline(context, [left, layer * tall, Math.max(cell, 3), tall], colour, 1.5);
  }

  /** Draws the scale of experts that differ. */
  legend(differ) {
    const { comparison } = this.view;
    differ.parentElement.hidden = !comparison;
    if (comparison) scale(differ, ramps().differs, this.#differing().marks);
  }

  #differing() {
    const { topK } = this.view.a;
    return { title: "≠: experts that differ", ramp: ramps().differs, marks: ["0", `${topK} of ${topK}`] };
  }

  /** What a file says below the figure. */
  legends() {
    return [meaningOf(this.view), ...(this.view.comparison ? [this.#differing()] : [])];
  }
}
