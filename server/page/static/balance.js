// How evenly the experts share the load, over time: entropy as a share of what it can be at most.

import { grown } from "./arrays.js";
import { GUTTER, line, sized, ticks } from "./canvas.js";
import { ink } from "./colours.js";
import { evenness, xlogx } from "./stats.js";

const HEIGHT = 150;

/** The balance after every row of an answer, over the last `span` rows; 0: over all of them. */
export class Balance {
  constructor(answer, span) {
    Object.assign(this, { answer, span });
    this.length = 0;
    this.counts = new Uint32Array(answer.layers * answer.experts);
    this.sums = new Float64Array(answer.layers); // of c log c
    this.slots = new Float64Array(answer.layers);
    this.values = new Float32Array(answer.layers * 256); // [row][layer]
    this.lines = { low: [], mean: [], high: [] };
  }

  /** Takes at most `most` more rows; whether there is more to do. */
  extend(most = 256) {
    const upTo = Math.min(this.length + most, this.answer.length);
    this.values = grown(this.values, upTo * this.answer.layers);
    for (; this.length < upTo; this.length++) {
      this.#row(this.length, 1);
      if (this.span && this.length >= this.span) this.#row(this.length - this.span, -1);
      this.#measure(this.length);
    }
    return upTo < this.answer.length;
  }

  #row(row, by) {
    const { layers, topK, experts, rows, size } = this.answer;
    for (let layer = 0, at = row * size; layer < layers; layer++) {
      for (let k = 0; k < topK; k++, at++) {
        if (rows[at] < 0) continue;
        const place = layer * experts + rows[at];
        const count = (this.counts[place] += by);
        this.sums[layer] += xlogx(count) - xlogx(count - by);
        this.slots[layer] += by;
      }
    }
  }

  #measure(row) {
    const { layers, experts } = this.answer;
    let [low, sum, high] = [1, 0, 0];
    for (let layer = 0; layer < layers; layer++) {
      const value = evenness(this.sums[layer], this.slots[layer], experts);
      this.values[row * layers + layer] = value;
      low = Math.min(low, value);
      high = Math.max(high, value);
      sum += value;
    }
    this.lines.low.push(low);
    this.lines.high.push(high);
    this.lines.mean.push(sum / layers);
  }

  at(row, layer) {
    return this.values[row * this.answer.layers + layer];
  }
}

export class BalanceChart {
  constructor(element, view, select) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.cursor = element.querySelector(".cursor");
    this.view = view;
    element.addEventListener("click", (event) => {
      const share = (event.clientX - element.getBoundingClientRect().left - GUTTER) / (element.clientWidth - GUTTER - 4);
      if (view.a && share >= 0 && share <= 1) select({ token: view.a.start + Math.round(share * Math.max(this.#rows - 1, 0)) });
    });
  }

  /** Draws anew even if nothing grew. */
  forget() {
    this.shows = null;
  }

  get #rows() {
    return Math.max(this.view.balanceA.length, this.view.balanceB?.length ?? 0);
  }

  draw() {
    const { balanceA: a, balanceB: b, layer, token } = this.view;
    const width = this.element.clientWidth - GUTTER - 4;
    const share = (token - this.view.a.start) / Math.max(this.#rows - 1, 1);
    this.cursor.style.transform = `translateX(${GUTTER + Math.min(Math.max(share, 0), 1) * width}px)`;
    const shows = [a.length, b?.length, layer, width].join();
    if (shows === this.shows && a === this.of) return;
    Object.assign(this, { shows, of: a });
    const context = sized(this.canvas, this.element.clientWidth, HEIGHT + 22);
    if (!a.length) return;
    const lowest = Math.min(...sample(a.lines.low, 200), ...(b ? sample(b.lines.mean, 200) : []));
    const floor = Math.max(Math.floor(lowest * 10 - 0.2) / 10, 0);
    const scale = { width, x: (row) => GUTTER + (row / Math.max(this.#rows - 1, 1)) * width, y: (value) => 6 + HEIGHT * (1 - (value - floor) / (1 - floor)) };
    this.#grid(context, scale, floor);
    const points = (length, value) => pointsOf(scale, length, value);
    const band = new Path2D();
    for (const point of points(a.length, (row) => a.lines.high[row])) band.lineTo(...point);
    for (const point of points(a.length, (row) => a.lines.low[row]).reverse()) band.lineTo(...point);
    context.fillStyle = ink("band");
    context.fill(band);
    line(context, points(a.length, (row) => a.lines.mean[row]), ink("bar"), 2);
    line(context, points(a.length, (row) => a.at(row, layer)), ink("select"), 2, [5, 3]);
    if (b) line(context, points(b.length, (row) => b.lines.mean[row]), ink("other"), 2, [2, 3]);
  }

  #grid(context, { width, x, y }, floor) {
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let share = 1; share >= floor - 0.001; share -= (1 - floor) / 4) {
      context.fillStyle = ink("line");
      context.fillRect(GUTTER, y(share), width, 1);
      context.fillStyle = ink("muted");
      context.fillText(`${Math.round(share * 100)} %`, GUTTER - 5, y(share));
    }
    context.textAlign = "left";
    context.textBaseline = "top";
    for (const at of ticks(0, this.#rows - 1, width / 80)) context.fillText(String(at + this.view.a.start), x(at), HEIGHT + 9);
  }
}

/** At most two points a pixel. */
function pointsOf({ width, x, y }, length, value) {
  const step = Math.max(1, Math.floor(length / (width * 2)));
  const rows = [];
  for (let row = 0; row < length; row += step) rows.push(row);
  if (rows.at(-1) !== length - 1) rows.push(length - 1);
  return rows.map((row) => [x(row), y(value(row))]);
}

const sample = (values, most) => values.filter((_, i) => i % Math.ceil(values.length / most) === 0);
