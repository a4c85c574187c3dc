// An answer as it grows: its tokens, the rows that are known, and what has been counted of them.

export class Answer {
  /**
   * `shape` = {layers, topK, experts, layerIds, knowsLayers, knowsExperts, model}: whether layers are decoder layers, and
   * experts as many as there are, or what the rows show. `start` is the position of the first row.
   */
  constructor(name, shape, start = 0) {
    Object.assign(this, shape, { name, start });
    this.size = shape.layers * shape.topK; // ids of a row
    this.tokens = []; // {text: string | null, id: number | null} by position
    this.promptLength = null; // P, once it is known
    this.rows = new Int16Array(this.size * 256);
    this.length = 0; // rows
    this.counts = new Uint32Array(shape.layers * shape.experts);
    this.slots = new Float64Array(shape.layers); // ids counted for each layer
    this.missing = 0;
    this.finished = null; // finish reason, or why it broke off
    this.error = null;
  }

  /** The position after the last row. */
  get end() {
    return this.start + this.length;
  }

  /** Appends whole rows, an Int16Array; ids out of range are an error. */
  addRows(ids) {
    const count = ids.length / this.size;
    for (let i = 0; i < ids.length; i++) {
      if (ids[i] < -1 || ids[i] >= this.experts) throw new Error(`Expert id ${ids[i]} is out of range: a layer has ${this.experts} experts.`);
    }
    this.#reserve((this.length + count) * this.size);
    this.rows.set(ids, this.length * this.size);
    this.length += count;
    this.#count(ids, count);
  }

  /** The ids of a cell; empty where the position has no row. */
  cell(position, layer) {
    const row = position - this.start;
    if (row < 0 || row >= this.length) return this.rows.subarray(0, 0);
    const at = row * this.size + layer * this.topK;
    return this.rows.subarray(at, at + this.topK);
  }

  /** How often an expert was chosen, as a multiple of what all would have if they shared evenly. */
  load(layer, expert) {
    const slots = this.slots[layer];
    return slots ? (this.counts[layer * this.experts + expert] * this.experts) / slots : 0;
  }

  /** A layer in words. */
  layerName(layer) {
    return `${this.knowsLayers ? "decoder" : "MoE"} layer ${this.layerIds[layer]}`;
  }

  text(position) {
    const token = this.tokens[position];
    return token?.text ?? (token?.id != null ? `#${token.id}` : "");
  }

  #reserve(needed) {
    if (needed <= this.rows.length) return;
    const larger = new Int16Array(Math.max(needed, this.rows.length * 2));
    larger.set(this.rows.subarray(0, this.length * this.size));
    this.rows = larger;
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
