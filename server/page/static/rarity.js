// How rare the experts of a cell, or of a token, are among all that an answer has used.

/** What is usual changes as an answer grows: this is as of `length` rows. */
export class Rarity {
  constructor(answer) {
    this.answer = answer;
    this.length = answer.length;
    this.wasFinished = answer.finished !== null;
    this.bits = bitsOf(answer);
    const { length, layers } = answer;
    this.cells = ends(sample(length * layers, 4000, (i) => this.#cell(Math.floor(i / layers), i % layers)));
    this.tokens = ends(sample(length, 200, (row) => this.#token(row)));
  }

  /** Whether the answer has grown by an eighth, or ended, since. */
  get isOld() {
    const { length, finished } = this.answer;
    return length >= this.length * 1.125 + 1 || (!this.wasFinished && finished !== null);
  }

  /** From 0, the most usual, to 1, the rarest; null where nothing is known. */
  ofCell(position, layer) {
    return share(this.#cell(position - this.answer.start, layer), this.cells);
  }

  /** The same of all layers together. */
  ofToken(position) {
    const row = position - this.answer.start;
    return row < 0 || row >= this.answer.length ? null : share(this.#token(row), this.tokens);
  }

  /** In bits: the mean over a token's experts of how much less than an even share each is chosen; null if unknown. */
  bitsOfToken(position) {
    return this.#token(position - this.answer.start);
  }

  /** The mean over the experts of a cell, in bits. */
  #cell(row, layer) {
    const { rows, size, topK, experts } = this.answer;
    const first = row * size + layer * topK;
    let [sum, known] = [0, 0];
    for (let at = first; at < first + topK; at++) {
      if (rows[at] < 0) continue;
      sum += this.bits[layer * experts + rows[at]];
      known++;
    }
    return known ? sum / known : null;
  }

  #token(row) {
    let [sum, known] = [0, 0];
    for (let layer = 0; layer < this.answer.layers; layer++) {
      const bits = this.#cell(row, layer);
      if (bits === null) continue;
      sum += bits;
      known++;
    }
    return known ? sum / known : null;
  }
}

const share = (bits, [low, high]) => (bits === null ? null : Math.min(Math.max((bits - low) / (high - low), 0), 1));

function sample(count, most, measure) {
  const step = Math.max(1, Math.floor(count / most));
  const found = [];
  for (let i = 0; i < count; i += step) found.push(measure(i));
  return found.filter((bits) => bits !== null);
}

/** Bits by which each expert is chosen less than an even share, negative where more. [L * experts] */
function bitsOf({ layers, experts, counts, slots }) {
  const bits = new Float32Array(layers * experts);
  for (let layer = 0, at = 0; layer < layers; layer++) {
    const even = Math.log2((slots[layer] + experts / 2) / experts);
    for (let expert = 0; expert < experts; expert++, at++) bits[at] = even - Math.log2(counts[at] + 0.5);
  }
  return bits;
}

/** Between which values nearly all lie. */
function ends(values) {
  const sorted = Float32Array.from(values).sort();
  const at = (share) => sorted[Math.floor(share * (sorted.length - 1))] ?? 0;
  return [at(0.02), Math.max(at(0.98), at(0.02) + 0.01)];
}
