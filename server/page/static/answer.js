// An answer as it grows: its tokens, the rows that are known, and what has been counted of them.

import { grown } from "./arrays.js";
import { weightText } from "./tokens.js";

export class Answer {
  /**
   * `shape` = {layers, topK, experts, layerIds, knowsLayers, knowsExperts, model, hasWeights, weightsScale}: whether layers
   * are decoder layers, and experts as many as there are, or what the rows show; whether rows have weights. `start` is the
   * position of the first row.
   */
  constructor(name, shape, start = 0) {
    Object.assign(this, shape, { name, start });
    this.size = shape.layers * shape.topK; // ids of a row
    this.tokens = []; // {text: string | null, id: number | null} by position
    this.promptLength = null; // P, once it is known
    this.rows = new Int16Array(this.size * 256);
    this.weights = this.hasWeights ? new Float32Array(this.rows.length) : null; // of the ids in rows
    this.length = 0; // rows
    this.counts = new Uint32Array(shape.layers * shape.experts);
    this.slots = new Float64Array(shape.layers); // ids counted for each layer
    this.sums = new Float64Array(this.counts.length); // of the weights that each expert was chosen with
    this.totals = new Float64Array(shape.layers); // of all weights of a layer
    this.missing = 0;
    this.finished = null; // finish reason, or why it broke off
    this.error = null;
  }

  /** The position after the last row. */
  get end() {
    return this.start + this.length;
  }

  /** Appends whole rows, an Int16Array, and their weights, a Float32Array, if it has them; ids out of range are an error. */
  addRows(ids, weights = null) {
    if (this.hasWeights && ids.length && weights?.length !== ids.length) throw new Error("The weights of some rows are missing.");
    const count = ids.length / this.size;
    for (let i = 0; i < ids.length; i++) {
      if (ids[i] < -1 || ids[i] >= this.experts) throw new Error(`Expert id ${ids[i]} is out of range: a layer has ${this.experts} experts.`);
    }
    const needed = (this.length + count) * this.size;
    this.rows = grown(this.rows, needed);
    this.weights &&= grown(this.weights, needed);
    this.rows.set(ids, this.length * this.size);
    if (this.hasWeights && weights) {
      this.weights.set(weights, this.length * this.size);
      this.#weigh(ids, weights);
    }
    this.length += count;
    this.#count(ids, count);
  }

  /** The ids of a cell, or its weights; empty where the position has no row. */
  cell(position, layer, values = this.rows) {
    const row = position - this.start;
    if (row < 0 || row >= this.length) return values.subarray(0, 0);
    const at = row * this.size + layer * this.topK;
    return values.subarray(at, at + this.topK);
  }

  /** The experts of a cell in words, with their weights if it has them. */
  cellInWords(position, layer) {
    const weights = this.weights && this.cell(position, layer, this.weights);
    const words = Array.from(this.cell(position, layer), (id, k) => `${id < 0 ? "unknown" : id}${weights ? ` (${weightText(weights[k])})` : ""}`);
    return words.join(", ") || "no row";
  }

  /** What is counted of each expert of each layer, choices or weights, and the sums of layers. */
  tally(byWeight) {
    return byWeight ? [this.sums, this.totals] : [this.counts, this.slots];
  }

  /** How often an expert was chosen, or with which weight, as a multiple of what all would have if they shared evenly. */
  load(layer, expert, byWeight = false) {
    const [counts, totals] = this.tally(byWeight);
    return totals[layer] ? (counts[layer * this.experts + expert] * this.experts) / totals[layer] : 0;
  }

  /** A layer in words. */
  layerName(layer) {
    return `${this.knowsLayers ? "decoder" : "MoE"} layer ${this.layerIds[layer]}`;
  }

  /** The answer as it is played again. */
  whole() {
    const { name, tokens, promptLength, start, finished, length, size, rows, weights } = this;
    return { name, tokens, promptLength, start, finished, rows: rows.slice(0, length * size), weights: weights?.slice(0, length * size) };
  }

  text(position) {
    const token = this.tokens[position];
    return token?.text ?? (token?.id != null ? `#${token.id}` : "");
  }

  #weigh(ids, weights) {
    const { layers, topK, experts, sums, totals } = this;
    weights.forEach((weight, at) => {
      if (ids[at] < 0 || Number.isNaN(weight)) return;
      const layer = Math.floor(at / topK) % layers;
      sums[layer * experts + ids[at]] += weight;
      totals[layer] += weight;
    });
  }

  #count(ids, count) {
    const { layers, topK, experts, counts, slots } = this;
    for (let row = 0, at = 0; row < count; row++) {
      let missing = 0;
      for (let layer = 0; layer < layers; layer++) {
        for (let k = 0; k < topK; k++, at++) {
          const id = ids[at];
          if (id < 0) missing = 1;
          else {
            counts[layer * experts + id]++;
            slots[layer]++;
          }
        }
      }
      this.missing += missing;
    }
  }
}
