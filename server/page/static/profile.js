// What the server has counted of all tokens: answers that have loads, and no tokens.

import { Answer } from "./answer.js";
import { numbersOf } from "./arrays.js";

let last = null; // the profile before: {name, counts, sums, tokens}
let asked = 0;

/** A profile as GET /v1/routed_experts/profile has it; from the second on, also what came since the one before. */
export function profilesOf({ counts, weights, tokens }, info) {
  const now = { name: `profile ${++asked}`, counts: numbersOf(counts), sums: weights && numbersOf(weights), tokens };
  const answers = [answerOf(now, info)];
  if (last && tokens > last.tokens) answers.push(answerOf(difference(now, last), info));
  last = now;
  return answers;
}

function difference(now, before) {
  const less = (values, others) => values?.map((value, i) => value - others[i]);
  return {
    name: `${now.name} − ${before.name}`,
    counts: less(now.counts, before.counts),
    sums: less(now.sums, before.sums),
    tokens: now.tokens - before.tokens,
  };
}

function answerOf({ name, counts, sums, tokens }, info) {
  const answer = new Answer({ name, info, model: info.model, hasWeights: Boolean(sums), finished: "profile" });
  const { layers, experts } = answer;
  const total = (values) => Float64Array.from({ length: layers }, (_, layer) => values.subarray(layer * experts, (layer + 1) * experts).reduce((one, other) => one + other, 0));
  Object.assign(answer, { counts, slots: total(counts), counted: tokens });
  return sums ? Object.assign(answer, { sums, totals: total(sums) }) : answer;
}
