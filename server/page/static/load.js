// The load of every expert in every layer: of one answer, or of two and what lies between them.

import { GUTTER, layerNumbers, outline, paint, scale, sized, ticks } from "./canvas.js";
import { diverging, ink, ramps } from "./colours.js";
import { loadsByWeight } from "./view.js";
import { watchPointer } from "./tip.js";
import { expertInWords } from "./words.js";

const EDGE = 18; // above a band, for its name
const AXIS = 18; // below, for the experts' numbers
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

  #at(event) {
    const box = this.element.getBoundingClientRect();
    const experts = this.#experts;
    const tall = this.#layerHeight;
    const expert = Math.floor(((event.clientX - box.left - GUTTER) / this.#width) * experts);
    const layer = Math.floor(((event.clientY - box.top - EDGE) % (this.view.a.layers * tall + EDGE)) / tall);
    return expert < 0 || expert >= experts || layer < 0 || layer >= this.view.a.layers ? null : { expert, layer };
  }

  /** What is drawn one below the other: a name, and the place on the scale of an expert, or of the highest of several. */
  get #bands() {
    const { a, b } = this.view;
    const byWeight = loadsByWeight();
    const highest = (value) => (layer, first, end) => {
      let most = value(layer, first);
      for (let expert = first + 1; expert < end; expert++) most = Math.max(most, value(layer, expert));
      return most;
    };
    const of = (answer) => highest((layer, expert) => place(answer.load(layer, expert, byWeight)));
    if (!b) return [["", of(a)]];
    const between = (layer, expert) => b.load(layer, expert, byWeight) - a.load(layer, expert, byWeight);
    return [["A", of(a)], ["B", of(b)], ["B − A", highest(between)]];
  }

  draw() {
    const { a, b, layer, expert } = this.view;
    const shows = [a.length, b?.length, layer, expert, loadsByWeight(), this.element.clientWidth].join();
    if (shows === this.shows && a === this.of) return;
    Object.assign(this, { shows, of: a });
    const tall = this.#layerHeight;
    const bands = this.#bands;
    const [width, height] = [this.#width, a.layers * tall];
    const context = sized(this.canvas, this.element.clientWidth, bands.length * (EDGE + height) + AXIS);
    const cell = width / this.#experts;
    for (const [name, value] of bands) {
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
      paint(context, 0, this.#experts, cell, a.layers, tall, (...cell) => diverging(value(...cell)));
      outline(context, [-1, layer * tall, width + 2, tall], ink("text"), 1.5);
      if (expert !== null) outline(context, [expert * cell, layer * tall, Math.max(cell, 2), tall], ink("text"), 3);
      context.restore();
      context.translate(0, height);
    }
    this.#axis(context, cell, 4);
  }

  #axis(context, cell, top) {
    context.fillStyle = ink("muted");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const at of ticks(0, this.#experts - 1, this.#width / 50)) context.fillText(String(at), GUTTER + Math.max((at + 0.5) * cell, 6), top); // beside the name
    context.textAlign = "left";
    context.fillText("expert", 1, top);
  }

  /** Draws the legends; what is added up can be chosen where there are weights. */
  legend(loads, between, choice) {
    const { a, b } = this.view;
    scale(loads, ramps().diverging, ["0", "½", "1 ×", "2", `≥ ${MOST}`]);
    between.parentElement.hidden = !b;
    scale(between, ramps().diverging, ["≤ −1", "−½", "0", "+½", "≥ 1"]);
    choice.hidden = !a.hasWeights || b?.hasWeights === false;
    this.shows = null;
  }
}
