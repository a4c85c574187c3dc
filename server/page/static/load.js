// The load of every expert in every layer, and the selected layer's as bars.

import { GUTTER, bar, layerNumbers, line, outline, sized } from "./canvas.js";
import { ink, ramps } from "./colours.js";

const BARS = 84;
const EDGE = 6;
const TOP = 4; // times the even share, at the ramp's end

export class LoadMap {
  constructor(element, view, select) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.picture = document.createElement("canvas");
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
    this.#paint();
    context.imageSmoothingEnabled = a.experts > width;
    context.translate(0, EDGE);
    context.drawImage(this.picture, GUTTER, 0, width, height);
    outline(context, [GUTTER - 1, layer * tall, width + 2, tall], ink("select"), 1.5);
    layerNumbers(context, a, layer, 0, tall);
    this.#bars(context, width, height + 14);
    if (expert !== null) {
      const x = GUTTER + (expert / a.experts) * width;
      outline(context, [x - 1, layer * tall - 1, Math.max(width / a.experts, 2) + 2, tall + 2], ink("select"), 2);
    }
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

  #paint() {
    const { a } = this.view;
    if (this.picture.width !== a.experts || this.picture.height !== a.layers) {
      Object.assign(this.picture, { width: a.experts, height: a.layers });
    }
    const image = new ImageData(a.experts, a.layers);
    const pixels = new Uint32Array(image.data.buffer);
    const ramp = ramps().load;
    const [counts, totals] = a.tally(this.byWeight);
    for (let layer = 0, at = 0; layer < a.layers; layer++) {
      const scale = totals[layer] ? a.experts / totals[layer] / TOP : 0;
      for (let i = 0; i < a.experts; i++, at++) {
        pixels[at] = ramp[Math.round(255 * Math.min(Math.sqrt(counts[at] * scale), 1))];
      }
    }
    this.picture.getContext("2d").putImageData(image, 0, 0);
  }

  /** The selected layer: filled for the answer, a line for the one beside it or else its other load, dashes for the even share. */
  #bars(context, width, top) {
    const { a, b, layer, expert } = this.view;
    const columns = Math.min(a.experts, Math.floor(width));
    const { byWeight } = this;
    const of = (answer, byWeight) => columnsOf(answer, layer, columns, byWeight);
    const bars = of(a, byWeight);
    let other = null;
    if (!b && a.hasWeights) other = of(a, !byWeight);
    else if (b && b.experts === a.experts && (b.hasWeights || !byWeight)) other = of(b, byWeight);
    const most = Math.max(2, ...bars, ...(other ?? []));
    const step = width / columns;
    const y = (load) => top + BARS * (1 - load / most);
    context.fillStyle = ink("bar");
    bars.forEach((load, i) => context.fillRect(GUTTER + i * step, y(load), Math.max(step - (step > 4 ? 1 : 0), 1), (BARS * load) / most));
    if (expert !== null) {
      const i = Math.floor((expert / a.experts) * columns);
      context.fillStyle = ink("select");
      context.fillRect(GUTTER + i * step, y(bars[i]), Math.max(step - 1, 2), Math.max((BARS * bars[i]) / most, 2));
    }
    const steps = other?.flatMap((load, i) => [i, i + 1].map((edge) => [GUTTER + edge * step, y(load)]));
    if (steps) line(context, steps, ink("other"), 1.5);
    line(context, [GUTTER, GUTTER + width].map((x) => [x, y(1)]), ink("text"), 1, [4, 3]);
    context.fillStyle = ink("muted");
    context.textAlign = "right";
    context.fillText("even", GUTTER - 6, y(1));
    context.fillText(`${most.toFixed(0)}×`, GUTTER - 6, top + 5);
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText("expert 0", GUTTER, top + BARS + 2);
    context.textAlign = "right";
    context.fillText(String(a.experts - 1), GUTTER + width, top + BARS + 2);
  }
}

/** The highest load within each of `columns` columns. */
function columnsOf(answer, layer, columns, byWeight) {
  const found = new Float64Array(columns);
  for (let expert = 0; expert < answer.experts; expert++) {
    const column = Math.floor((expert / answer.experts) * columns);
    found[column] = Math.max(found[column], answer.load(layer, expert, byWeight));
  }
  return Array.from(found);
}
