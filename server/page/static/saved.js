// Answers as lines of JSON: as the server reads them in files, and as they are saved.

import { decode, encode } from "./arrays.js";

/** In place of a finish reason. */
export const UNFINISHED = "not finished";

/** The answers in the lines of a server or of `routed-experts view`, whose `page_lines` says what they have. */
export function read(lines) {
  return lines.split("\n").filter(Boolean).map((text) => {
    const { error, rows: array, weights: beside, ids, texts, prompt_len: promptLength, finish_reason: reason, ...about } = JSON.parse(text);
    if (error) throw new Error(error.message);
    const { rows, weights, shape, start } = decode(array, beside);
    const count = Math.max(start + shape[0] + 1, promptLength ?? 0, endOf(ids), endOf(texts));
    return { ...about, rows, weights, shape, start, tokens: tokensOf(count, ids, texts), promptLength, finished: reason ?? UNFINISHED };
  });
}

const UNKNOWN = Object.freeze({ id: null, text: null });
const endOf = (known) => (known ? known.start + known.values.length : 0);

/** {id, text} by position, of which a line has what is known. */
function tokensOf(count, ids, texts) {
  const tokens = Array(count).fill(UNKNOWN);
  for (const [name, known] of Object.entries({ id: ids, text: texts })) {
    known?.values.forEach((value, i) => (tokens[known.start + i] = { ...tokens[known.start + i], [name]: value }));
  }
  return tokens;
}

/** An answer as a line that everything reads that reads responses. */
export function line(answer) {
  const { layers, topK, start, tokens, size, model, promptLength } = answer;
  const split = Math.min(Math.max((promptLength ?? 0) - start, 0), answer.length);
  const part = (from, to, values = answer.rows) => encode(values.subarray(from * size, to * size), [to - from, layers, topK], start + from);
  const [before, after] = [tokens.slice(0, promptLength ?? 0), tokens.slice(promptLength ?? 0)];
  const choice = { index: 0, text: after.map(({ text }) => text).join(""), routed_experts: part(split, answer.length) };
  choice.logprobs = { tokens: tokens.map(({ text }) => text) }; // the prompt's too, as with `echo`
  const body = { object: "text_completion", model, choices: [choice], routed_experts_info: infoOf(answer) };
  if (answer.weights) choice.routed_expert_weights = part(split, answer.length, answer.weights);
  choice.finish_reason = answer.finished === UNFINISHED ? null : answer.finished;
  if (promptLength !== null) {
    Object.assign(choice, { prompt_token_ids: idsOf(before), token_ids: idsOf(after) });
    body.prompt_routed_experts = part(0, split);
    if (answer.weights) body.prompt_routed_expert_weights = part(0, split, answer.weights);
  }
  return `${JSON.stringify(body)}\n`;
}

/** Undefined, which JSON leaves out, where they are not known. */
const idsOf = (tokens) => (tokens.every(({ id }) => id !== null) ? tokens.map(({ id }) => id) : undefined);

const INFO = ["num_layers", "top_k", "num_experts", "layer_ids", "weights_scale"];
const infoOf = ({ info }) => Object.fromEntries(INFO.map((name) => [name, info[name]]));
