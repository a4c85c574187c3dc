// The load of every expert in every layer: of one answer, or of two and what lies between them.

import { GUTTER, layerNumbers, outline, paint, scale, sized, ticks } from "./canvas.js";
import { diverging, ink, ofLoad, ramps } from "./colours.js";
import { Order } from "./order.js";
import { loadsByWeight } from "./view.js";
import { watchPointer } from "./tip.js";
import { expertInWords } from "./words.js";

const EDGE = 18; // above a band, for its name
const AXIS = 18; // below, for the experts' numbers
const TITLES = { number: "expert", load: "place", likeness: "alike: beside each other" };
const MOST = 4; // times the even share, at the scale's end

/** From -1 to 1 for a multiple of the even share: 0 for the even share itself. */
const place = (load) => (load < 1 ? load - 1 : Math.log2(load) / Math.log2(MOST));

export class LoadMap {
  constructor(element, view, select) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.view = view;
    element.addEventListener("click", (event) => {
      const cell = this.#at(event);
      if (cell) select(cell);
    });
    watchPointer(element, (event) => {
      const cell = this.#at(event);
      return cell && [`Layer ${view.a.layerIds[cell.layer]}. ${expertInWords({ ...view, ...cell })}`];
    });
  }

  get #layerHeight() {
    const { a, b } = this.view;
    return Math.max(b ? 3 : 4, Math.min(22, Math.floor((b ? 130 : 300) / a.layers)));
  }

  get #width() {
    return this.element.clientWidth - GUTTER - 2;
  }

  /** How many experts a layer has. */
  get #experts() {
    return Math.max(this.view.a.experts, this.view.b?.experts ?? 0);
  }

  /** Of the columns; found anew when more has come. */
  get #order() {
    const { a, b, columns } = this.view;
    const key = [columns, a.length, b?.length, loadsByWeight()].join();
    if (this.ordered?.key !== key || this.ordered.a !== a || this.ordered.b !== b) {
      const load = (answer, layer, expert) => answer.load(layer, expert, loadsByWeight());
      this.ordered = { key, a, b, order: new Order(columns, [a, b].filter(Boolean), load) };
    }
    return this.ordered.order;
  }

  /** The expert some columns to the right of another; the first one if there is none. */
  beside(layer, expert, by) {
    const order = this.#order;
    const column = expert === null ? 0 : order.columnOf(layer, expert) + by;
    return order.expertAt(layer, Math.min(Math.max(column, 0), this.view.a.experts - 1));
  }

  #at(event) {
    const box = this.element.getBoundingClientRect();
    const experts = this.#experts;
    const tall = this.#layerHeight;
    const column = Math.floor(((event.clientX - box.left - GUTTER) / this.#width) * experts);
    const layer = Math.floor(((event.clientY - box.top - EDGE) % (this.view.a.layers * tall + EDGE)) / tall);
    if (column < 0 || column >= experts || layer < 0 || layer >= this.view.a.layers) return null;
    return { expert: this.#order.expertAt(layer, column), layer };
  }

  /** What is drawn one below the other: a name, and the colour of a column, or of the highest of several. */
  get #bands() {
    const { a, b } = this.view;
    const byWeight = loadsByWeight();
    const order = this.#order;
    const highest = (value) => (layer, first, end) => {
      let most = -Infinity;
      for (let column = first; column < end; column++) most = Math.max(most, value(layer, order.expertAt(layer, column)));
      return most;
    };
    const of = (answer) => {
      const value = highest((layer, expert) => place(answer.load(layer, expert, byWeight)));
      return (...cell) => ofLoad(value(...cell));
    };
    if (!b) return [["", of(a)]];
    const between = highest((layer, expert) => b.load(layer, expert, byWeight) - a.load(layer, expert, byWeight));
    return [["A", of(a)], ["B", of(b)], ["B − A", (...cell) => diverging(between(...cell))]];
  }

  draw() {
    const { a, b, layer, expert, columns } = this.view;
    const shows = [a.length, b?.length, layer, expert, columns, loadsByWeight(), this.element.clientWidth].join();
    if (shows === this.shows && a === this.of) return;
    Object.assign(this, { shows, of: a });
    const tall = this.#layerHeight;
    const bands = this.#bands;
    const [width, height] = [this.#width, a.layers * tall];
    const context = sized(this.canvas, this.element.clientWidth, bands.length * (EDGE + height) + AXIS);
    const cell = width / this.#experts;
    for (const [name, colour] of bands) {
      context.translate(0, EDGE);
      context.textBaseline = "middle";
      context.textAlign = "left";
      context.fillStyle = ink("text");
      context.fillText(name, GUTTER, -8);
      context.textAlign = "right";
      context.fillStyle = ink("muted");
      context.fillText("layer", GUTTER - 6, -8);
      layerNumbers(context, a, layer, 0, tall);
      context.save();
      context.translate(GUTTER, 0);
      paint(context, 0, this.#experts, cell, a.layers, tall, colour);
      outline(context, [-1, layer * tall, width + 2, tall], ink("text"), 1.5);
      if (expert !== null) outline(context, [this.#order.columnOf(layer, expert) * cell, layer * tall, Math.max(cell, 2), tall], ink("text"), 3);
      context.restore();
      context.translate(0, height);
    }
    this.#axis(context, cell, 4);
  }

  /** Numbers of experts; in another order a column is another expert in each layer. */
  #axis(context, cell, top) {
    context.fillStyle = ink("muted");
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(TITLES[this.view.columns], 1, top);
    if (this.view.columns === "likeness") return;
    context.textAlign = "center";
    for (const at of ticks(0, this.#experts - 1, this.#width / 50)) context.fillText(String(at), GUTTER + Math.max((at + 0.5) * cell, 6), top); // beside the title
  }

  /** What the colours mean; of two answers also those of what lies between them. */
  legends() {
    const loads = { title: "Multiple of the even share", ramp: ramps().load, marks: ["0", "½", "1 ×", "2", `≥ ${MOST}`] };
    const between = { title: "B − A, in even shares", ramp: ramps().diverging, marks: ["≤ −1", "−½", "0", "+½", "≥ 1"] };
    return this.view.b ? [loads, between] : [loads];
  }

  /** Draws the legends; what is added up can be chosen where there are weights. */
  legend(loads, between, choice) {
    const { a, b } = this.view;
    const [ofLoads, ofBetween] = this.legends();
    scale(loads, ofLoads.ramp, ofLoads.marks);
    between.parentElement.hidden = !ofBetween;
    if (ofBetween) scale(between, ofBetween.ramp, ofBetween.marks);
    choice.hidden = !a.hasWeights || b?.hasWeights === false;
    this.shows = null;
  }
}
