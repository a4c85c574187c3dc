// What lists and matrices measure of a tally: {experts, counts: [L * E], slots: [L]}, which an answer is, too.

export const xlogx = (count) => (count > 1 ? count * Math.log2(count) : 0);

/** Entropy divided by its maximum, where the counts' sum is `slots` and the sum of their c log c is `sum`. */
export function evenness(sum, slots, experts) {
  const most = Math.log2(Math.min(experts, slots));
  return slots > 1 && most > 0 ? Math.min((Math.log2(slots) - sum / slots) / most, 1) : 1;
}

/** The balance of a layer, over all its tokens. */
export function balanceOf({ experts, counts, slots }, layer) {
  let sum = 0;
  for (let i = layer * experts; i < (layer + 1) * experts; i++) sum += xlogx(counts[i]);
  return evenness(sum, slots[layer], experts);
}

/** The share of a layer's choices that go to other experts in b than in a: half the sum of the differences of shares. */
export function distance(a, b, layer) {
  if (!a.slots[layer] || !b.slots[layer]) return null;
  const share = (of, expert) => (expert < of.experts ? of.counts[layer * of.experts + expert] / of.slots[layer] : 0);
  let sum = 0;
  for (let expert = 0; expert < Math.max(a.experts, b.experts); expert++) sum += Math.abs(share(a, expert) - share(b, expert));
  return sum / 2;
}

/** Mean over the values that are known; null if none is. */
export function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** The tally of a whole answer that is not shown. */
export function tallyOf({ rows, shape: [layers, topK] }, experts) {
  const tally = { experts, counts: new Uint32Array(layers * experts), slots: new Float64Array(layers) };
  for (let at = 0; at < rows.length; at++) {
    if (rows[at] < 0) continue;
    const layer = Math.floor(at / topK) % layers;
    tally.counts[layer * experts + rows[at]]++;
    tally.slots[layer]++;
  }
  return tally;
}

/** The tokens that chose an expert: [{position, choice: from 1 in the router's order, weight: NaN where unknown}]. */
export function tokensOf(answer, layer, expert) {
  const found = [];
  for (let position = answer.start; position < answer.end; position++) {
    const at = answer.cell(position, layer).indexOf(expert);
    if (at >= 0) found.push({ position, choice: at + 1, weight: answer.weights ? answer.cell(position, layer, answer.weights)[at] : NaN });
  }
  return found;
}

/**
 * How many tokens chose expert i of one layer and expert j of another, or of the same: {counts: [E * E], left: [E],
 * right: [E], tokens}. `left` and `right` are the tokens of each expert, `tokens` those that are known in both layers.
 */
export function pairsOf(answer, from, to) {
  const { experts, size, topK, rows, length } = answer;
  const [counts, left, right] = [new Uint32Array(experts * experts), new Uint32Array(experts), new Uint32Array(experts)];
  let tokens = 0;
  for (let row = 0; row < length; row++) {
    const [one, other] = [row * size + from * topK, row * size + to * topK];
    if (rows[one] < 0 || rows[other] < 0) continue;
    tokens++;
    for (let k = 0; k < topK; k++) {
      const i = rows[one + k];
      left[i]++;
      right[rows[other + k]]++;
      for (let l = 0; l < topK; l++) counts[i * experts + rows[other + l]]++;
    }
  }
  return { counts, left, right, tokens };
}

/** How often a pair is chosen, as a multiple of how often it would be if the two were independent. */
export function lift({ counts, left, right, tokens }, i, j) {
  const expected = (left[i] * right[j]) / tokens;
  return expected ? counts[i * left.length + j] / expected : 0;
}
