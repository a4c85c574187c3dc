// Two answers side by side: where they part.

import { grown } from "./arrays.js";
import { byChance } from "./chance.js";

export class Comparison {
  constructor(a, b) {
    checkSameModel(a, b);
    Object.assign(this, { a, b });
    this.start = Math.max(a.start, b.start);
    this.length = 0; // rows compared
    this.cells = new Uint8Array(a.layers * 256); // experts of a that are not b's
    this.byLayer = new Uint32Array(a.layers); // cells that differ
    this.differing = 0;
    this.first = null; // {position, layer}
    this.firstToken = null; // the first position with another token
    this.tokensCompared = 0;
    this.areKnown = true; // whether the tokens compared are
  }

  get end() {
    return this.start + this.length;
  }

  /** How many experts of a cell differ; null where it has not been compared. */
  at(position, layer) {
    return position < this.start || position >= this.end ? null : this.cells[(position - this.start) * this.a.layers + layer];
  }

  /** The share of experts that differ in a layer, over the positions `first` to `end`. */
  share(layer, first, end) {
    let sum = 0;
    for (let position = first; position < end; position++) sum += this.at(position, layer);
    return sum / (end - first) / this.a.topK;
  }

  /** Whether a position is a token of one answer's prompt and another token in the other: rows are not of the same text. */
  get hasOtherPrompts() {
    return this.firstToken !== null && this.firstToken < Math.max(this.a.promptLength, this.b.promptLength);
  }

  /** Compares what both have now. */
  extend() {
    const { a, b, layers = a.layers } = this;
    const upTo = Math.min(a.end, b.end);
    this.cells = grown(this.cells, (upTo - this.start) * layers);
    for (let position = this.end; position < upTo; position++) {
      for (let layer = 0; layer < layers; layer++) {
        const others = differing(a.cell(position, layer), b.cell(position, layer));
        this.cells[(position - this.start) * layers + layer] = others;
        if (!others) continue;
        this.differing++;
        this.byLayer[layer]++;
        this.first ??= { position, layer };
      }
      this.length++;
    }
    this.#compareTokens();
  }

  #compareTokens() {
    const [one, other] = [this.a.tokens, this.b.tokens];
    const both = Math.min(one.length, other.length);
    for (; this.firstToken === null && this.tokensCompared < both; this.tokensCompared++) {
      const i = this.tokensCompared;
      const same = isSame(one[i].id, other[i].id) ?? isSame(one[i].text, other[i].text);
      if (same === false) this.firstToken = i;
      this.areKnown &&= same !== null;
    }
  }

  #tokensInWords() {
    const { a, b, firstToken } = this;
    if (firstToken !== null) return `Tokens differ from position ${firstToken}.`;
    if (!this.areKnown) return "Not all tokens are known.";
    const haveEnded = a.finished !== null && b.finished !== null;
    if (haveEnded && a.tokens.length === b.tokens.length) return "Tokens are equal.";
    return "Tokens are equal up to the end of the shorter response.";
  }

  /** The findings as a sentence. */
  sentence() {
    if (!this.length) return "The responses have no positions in common yet.";
    const { a, length, first } = this;
    const size = `${length} positions × ${a.layers} layers`;
    const tokens = this.#tokensInWords();
    if (!first) return `${tokens} Experts are equal in all of ${size}.`;
    const share = percent(this.differing / (length * a.layers));
    const most = this.byLayer.indexOf(Math.max(...this.byLayer));
    const where = `most in ${a.layerName(most)} (${percent(this.byLayer[most] / length)})`;
    return `${tokens} Experts differ from position ${first.position}, ${a.layerName(first.layer)}: in ${share} of ${size}, ${where}.`;
  }
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** How many of some ids are not among others; those that are unknown are not counted. */
export const differing = (ids, others) => ids.filter((id) => id >= 0 && !others.includes(id)).length;

/** Null where one of the two is not known. */
const isSame = (one, other) => (one === null || other === null ? null : one === other);

/** Raises an Error where the rows of two answers mean different things. */
export function checkSameModel(a, b) {
  if (a.layers !== b.layers || a.topK !== b.topK) {
    throw new Error("The responses are from different models: their rows have different shapes.");
  }
  if (a.knowsLayers && b.knowsLayers && String(a.layerIds) !== String(b.layerIds)) {
    throw new Error("The responses are from different models: their rows have different decoder layers.");
  }
}

/** The share of a layer's choices that go to other experts in b than in a: half the sum of the differences of shares. */
function distance(a, b, layer) {
  if (!a.slots[layer] || !b.slots[layer]) return 0;
  const share = (of, expert) => (expert < of.experts ? of.counts[layer * of.experts + expert] / of.slots[layer] : 0);
  let sum = 0;
  for (let expert = 0; expert < Math.max(a.experts, b.experts); expert++) sum += Math.abs(share(a, expert) - share(b, expert));
  return sum / 2;
}

/** The mean over all layers. */
function meanDistance(a, b) {
  let sum = 0;
  for (let layer = 0; layer < a.layers; layer++) sum += distance(a, b, layer);
  return sum / a.layers;
}

let chance = {}; // {shows, a, b, words} of the last two: it takes a while

/** How far the loads of two answers are apart, as a sentence, and how far they would be by chance. */
export function loadsInWords(a, b) {
  const by = a.layerIds.map((_, layer) => distance(a, b, layer));
  const most = by.indexOf(Math.max(...by));
  const load = `Load: ${percent(meanDistance(a, b))} of the choices go to other experts in B than in A, most in ${a.layerName(most)} (${percent(by[most])}).`;
  const shows = [a.length, b.length, a.finished, b.finished].join();
  if (chance.a !== a || chance.b !== b || chance.shows !== shows) chance = { a, b, shows, words: chanceInWords(a, b) };
  return load + chance.words;
}

function chanceInWords(a, b) {
  const found = byChance(a, b, meanDistance);
  if (!found) return "";
  const what = a.members ? "the responses" : "their tokens";
  const dealt = b.whole ? "For as many tokens of A, drawn at random" : `If chance dealt ${what} to A and B`;
  const level = ` ${dealt}, it would be ${percent(found.mean)} (in 95 % of ${b.whole ? "draws" : "deals"} at most ${percent(found.most)}).`;
  // The tokens of one text are alike, so that chance is a low bar for a pair.
  return a.members || b.whole ? level : `${level} Two texts of one kind differ by more than that, too: groups tell kinds apart.`;
}
