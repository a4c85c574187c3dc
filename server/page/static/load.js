// The load of every expert in every layer, and the selected layer's as bars.

import { GUTTER, bar, layerNumbers, line, outline, paint, sized } from "./canvas.js";
import { ink, ramps } from "./colours.js";

const BARS = 84;
const EDGE = 6;
const TOP = 4; // times the even share, at the ramp's end

export class LoadMap {
  constructor(element, view, select) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.view = view;
    element.addEventListener("click", (event) => {
      const cell = this.#at(event);
      if (cell) select(cell);
    });
  }

  get #layerHeight() {
    return Math.max(3, Math.min(18, Math.floor(220 / this.view.a.layers)));
  }

  /** Whether weights are added up instead of choices. */
  get byWeight() {
    return this.view.byWeight && this.view.a.hasWeights;
  }

  get #width() {
    return this.element.clientWidth - GUTTER - 2;
  }

  #at(event) {
    const { a } = this.view;
    const box = this.element.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left - GUTTER) / this.#width) * a.experts);
    const layer = Math.floor((event.clientY - box.top - EDGE) / this.#layerHeight);
    if (expert < 0 || expert >= a.experts) return null;
    return { expert, layer: layer < a.layers ? Math.max(layer, 0) : this.view.layer };
  }

  draw() {
    const { a, b, layer, expert } = this.view;
    const shows = [a.length, b?.length, layer, expert, this.byWeight, this.element.clientWidth].join();
    if (shows === this.shows && a === this.of) return;
    Object.assign(this, { shows, of: a });
    const tall = this.#layerHeight;
    const [width, height] = [this.#width, a.layers * tall];
    const context = sized(this.canvas, this.element.clientWidth, height + BARS + 44);
    context.translate(0, EDGE);
    layerNumbers(context, a, layer, 0, tall);
    context.translate(GUTTER, 0);
    const { load } = ramps();
    const cell = width / a.experts;
    const { byWeight } = this;
    const colour = (layer, first, end) => load[Math.round(255 * Math.min(Math.sqrt(highest(a, byWeight, layer, first, end) / TOP), 1))];
    paint(context, 0, a.experts, cell, a.layers, tall, colour);
    outline(context, [-1, layer * tall, width + 2, tall], ink("select"), 1.5);
    if (expert !== null) outline(context, [expert * cell - 1, layer * tall - 1, Math.max(cell, 2) + 2, tall + 2], ink("select"), 2);
    context.translate(0, height + 14);
    this.#bars(context, width);
  }

  /** Draws the legend, and says it in words; what is added up can be chosen where there are weights. */
  legend(canvas, text, choice) {
    bar(canvas, ramps().load);
    const { a, b } = this.view;
    const line = a.hasWeights && !b ? `; line: by ${this.byWeight ? "choices" : "weights"}` : "";
    text.textContent = `from 0 to at least ${TOP} times the even share; bars: selected layer${line}`;
    choice.hidden = !a.hasWeights;
    this.shows = null;
  }

  /** The selected layer: filled for the answer, a line for the one beside it or else its other load, dashes for the even share. */
  #bars(context, width) {
    const { a, b, layer, expert } = this.view;
    const { byWeight } = this;
    const count = Math.min(a.experts, Math.floor(width));
    const first = (i) => Math.ceil((i / count) * a.experts); // of the experts that share a bar
    const of = (answer, byWeight) => Array.from({ length: count }, (_, i) => highest(answer, byWeight, layer, first(i), first(i + 1)));
    const bars = of(a, byWeight);
    let other = null;
    if (!b && a.hasWeights) other = of(a, !byWeight);
    else if (b && b.experts === a.experts && (b.hasWeights || !byWeight)) other = of(b, byWeight);
    const most = Math.max(2, ...bars, ...(other ?? []));
    const step = width / count;
    const y = (load) => BARS * (1 - load / most);
    const selected = expert === null ? -1 : Math.floor((expert / a.experts) * count);
    bars.forEach((load, i) => {
      context.fillStyle = ink(i === selected ? "select" : "bar");
      const tall = Math.max((BARS * load) / most, i === selected ? 2 : 0);
      context.fillRect(i * step, BARS - tall, Math.max(step - (step > 4 ? 1 : 0), 1), tall);
    });
    const steps = other?.flatMap((load, i) => [i, i + 1].map((edge) => [edge * step, y(load)]));
    if (steps) line(context, steps, ink("other"), 1.5);
    line(context, [0, width].map((x) => [x, y(1)]), ink("text"), 1, [4, 3]);
    context.fillStyle = ink("muted");
    context.textAlign = "right";
    context.fillText("even", -6, y(1));
    context.fillText(`${most.toFixed(0)}×`, -6, 5);
    context.textBaseline = "top";
    context.fillText(String(a.experts - 1), width, BARS + 2);
    context.textAlign = "left";
    context.fillText("expert 0", 0, BARS + 2);
  }
}

/** The highest load among the experts `first` to `end` of a layer. */
function highest(answer, byWeight, layer, first, end) {
  let most = 0;
  for (let expert = first; expert < end; expert++) most = Math.max(most, answer.load(layer, expert, byWeight));
  return most;
}
