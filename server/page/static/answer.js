// An answer as it grows: its tokens, the rows that are known, and what has been counted of them.

import { grown } from "./arrays.js";
import { weightText } from "./tokens.js";

export class Answer {
  /**
   * `info` is what is known of the model, in the names of GET /v1/routed_experts; `experts` how many a layer has, or the
   * rows show; `start` the position of the first row. Of one that is whole, also its tokens and the `file` that it is from.
   */
  constructor({ name, model, info, hasWeights, start = 0, experts = info.num_experts, file, ...whole }) {
    const { num_layers: layers, top_k: topK, layer_ids: layerIds } = info;
    Object.assign(this, { name, model, info, hasWeights, start, experts, layers, topK, file });
    this.knowsLayers = Boolean(layerIds); // whether they are decoder layers
    this.layerIds = layerIds ?? Array.from({ length: layers }, (_, i) => i);
    this.size = layers * topK; // ids of a row
    this.tokens = whole.tokens ?? []; // {text: string | null, id: number | null} by position
    this.promptLength = whole.promptLength ?? null; // P, once it is known
    this.rows = new Int16Array(this.size * 256);
    this.weights = this.hasWeights ? new Float32Array(this.rows.length) : null; // of the ids in rows
    this.places = this.hasWeights ? new Uint16Array(this.rows.length) : null; // in its cell, of the choice of each rank
    this.length = 0; // rows
    this.counts = new Uint32Array(layers * experts);
    this.slots = new Float64Array(layers); // ids counted for each layer
    this.sums = new Float64Array(this.counts.length); // of the weights that each expert was chosen with
    this.totals = new Float64Array(layers); // of all weights of a layer
    this.mostWeight = 0; // the largest of all
    this.missing = 0;
    this.finished = whole.finished ?? null; // finish reason, or why it broke off
    this.begins = new Set(); // of a sample (samples.js): the positions where those of another response begin
    this.members = null; // of a group: its responses
    this.whole = null; // of some tokens of a response: that response
    this.counted = null; // of a profile, which has no rows: how many tokens
  }

  /** The position after the last row. */
  get end() {
    return this.start + this.length;
  }

  /** Whether it is no response, but tokens of some. */
  get isSample() {
    return Boolean(this.members || this.whole) || this.isProfile;
  }

  get isProfile() {
    return this.counted !== null;
  }

  /** Appends whole rows, an Int16Array, and their weights, a Float32Array, if it has them; ids out of range are an error. */
  addRows(ids, weights) {
    if (this.hasWeights && weights?.length !== ids.length) throw new Error("The weights of some rows are missing.");
    const wrong = ids.find((id) => id < -1 || id >= this.experts);
    if (wrong !== undefined) throw new Error(`Expert id ${wrong} is out of range: a layer has ${this.experts} experts.`);
    const at = this.length * this.size;
    this.rows = grown(this.rows, at + ids.length);
    this.rows.set(ids, at);
    this.weights &&= grown(this.weights, at + ids.length);
    this.weights?.set(weights, at);
    if (this.weights) this.#rank(at, ids.length);
    this.length += ids.length / this.size;
    this.#count(ids, this.weights && weights);
  }

  /** The ids of a cell, or its weights; empty where the position has no row. */
  cell(position, layer, values = this.rows) {
    const row = position - this.start;
    if (row < 0 || row >= this.length) return values.subarray(0, 0);
    const at = row * this.size + layer * this.topK;
    return values.subarray(at, at + this.topK);
  }

  /**
   * The choices of a cell, {id, weight, rank}: by weight, the largest first, whose rank is 1. Routers need not return them
   * in that order, so without weights there is no rank (null), and the order is the router's.
   */
  choices(position, layer) {
    const ids = Array.from(this.cell(position, layer));
    if (!this.weights || !ids.length) return ids.map((id) => ({ id, weight: null, rank: null }));
    const weights = this.cell(position, layer, this.weights);
    return Array.from(this.cell(position, layer, this.places), (place, i) => ({ id: ids[place], weight: weights[place], rank: i + 1 }));
  }

  /** Of `choices`, that of an expert; undefined if it was not chosen. */
  choiceOf(position, layer, expert) {
    if (!this.cell(position, layer).includes(expert)) return undefined;
    return this.choices(position, layer).find(({ id }) => id === expert);
  }

  /** The expert of a rank, from 1, of an answer with weights. */
  expertOfRank(position, layer, rank) {
    const at = (position - this.start) * this.size + layer * this.topK;
    return this.rows[at + this.places[at + rank - 1]];
  }

  /** The experts of a cell in words, with their weights if it has them. */
  cellInWords(position, layer) {
    const words = this.choices(position, layer).map(({ id, weight }) => `${id < 0 ? "unknown" : id}${weight === null ? "" : ` (${weightText(weight)})`}`);
    return words.join(", ") || "no row";
  }

  /** How many tokens chose an expert. */
  count(layer, expert) {
    return expert < this.experts ? this.counts[layer * this.experts + expert] : 0;
  }

  /** How often an expert was chosen, or with which weight, as a multiple of what all would have if they shared evenly. */
  load(layer, expert, byWeight = false) {
    const total = (byWeight ? this.totals : this.slots)[layer];
    if (!total || expert >= this.experts) return 0;
    return ((byWeight ? this.sums : this.counts)[layer * this.experts + expert] * this.experts) / total;
  }

  /** A layer in words. */
  layerName(layer) {
    return `${this.layerKind} ${this.layerIds[layer]}`;
  }

  get layerKind() {
    return this.knowsLayers ? "decoder layer" : "MoE layer";
  }

  text(position) {
    const token = this.tokens[position];
    return token?.text ?? (token?.id != null ? `#${token.id}` : "");
  }

  /** Sorts the choices of new cells by weight, unknown ones last. Equal ones stay in the router's order. */
  #rank(from, count) {
    const { topK, weights } = this;
    const known = (at) => (Number.isNaN(weights[at]) ? -Infinity : weights[at]);
    this.places = grown(this.places, from + count);
    const { places } = this;
    for (let cell = from; cell < from + count; cell += topK) {
      for (let k = 0; k < topK; k++) {
        let rank = k;
        while (rank && known(cell + places[cell + rank - 1]) < known(cell + k)) {
          places[cell + rank] = places[cell + rank - 1];
          rank--;
        }
        places[cell + rank] = k;
      }
    }
  }

  #count(ids, weights) {
    const { layers, topK, experts, size, counts, slots, sums, totals } = this;
    let lastMissing = -1; // row
    for (let at = 0; at < ids.length; at++) {
      const layer = Math.floor(at / topK) % layers;
      const place = layer * experts + ids[at];
      if (ids[at] >= 0) {
        counts[place]++;
        slots[layer]++;
        if (!weights || Number.isNaN(weights[at])) continue;
        if (weights[at] > this.mostWeight) this.mostWeight = weights[at];
        sums[place] += weights[at];
        totals[layer] += weights[at];
      } else if (Math.floor(at / size) !== lastMissing) {
        lastMissing = Math.floor(at / size);
        this.missing++;
      }
    }
  }
}
