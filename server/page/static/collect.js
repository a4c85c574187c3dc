// Puts the parts of a response together: the rows of each choice by position. What does not fit is an error.

import { decode } from "./arrays.js";

const MOST_TOKENS = 1 << 20; // of a choice on the page

/**
 * The choices of a response, given as its body, or as the chunks of its stream: {index, rows, weights, shape, start, tokens,
 * promptLength, finished}. `info` is what is known of the model.
 */
export function choicesOf(parts, info) {
  const collector = new Collector();
  parts.forEach((part) => collector.take(part));
  return collector.choices(info);
}

/** A field of a response; also one that LiteLLM put aside. */
const field = (json, name) => json[name] ?? json.provider_specific_fields?.[name] ?? null;

/** A list of a response, or null. */
function listIn(json, name, isItem) {
  const list = field(json, name);
  if (list !== null && !(Array.isArray(list) && list.every(isItem))) throw new Error(`its ${name} have another form than the server's`);
  return list;
}

const isCount = (value) => Number.isInteger(value) && value >= 0 && value < 2 ** 31;
const isChoice = (json) => json?.constructor === Object && isCount(json.index ?? 0) && typeof (json.finish_reason ?? "") === "string";

/** Rows of a prompt, or those that were generated for a choice: arrays without gap or overlap. */
class Segment {
  constructor(name) {
    Object.assign(this, { name, arrays: [], start: null, length: 0 });
  }

  append(array) {
    if (array.start !== null) {
      this.start ??= array.start;
      const end = this.start + this.length;
      if (array.start !== end) throw new Error(`${this.name}: rows from ${array.start} on after ${end}`);
    }
    if (this.arrays.length && !array.shape[0]) return; // streams may have any number of these
    this.arrays.push(array);
    this.length += array.shape[0];
  }
}

class Choice extends Segment {
  constructor(index) {
    super(`choice ${index}`);
    Object.assign(this, { index, promptIds: null, ids: null, texts: [], finished: null });
  }

  addTokens(ids, texts) {
    if (ids) this.ids ??= [];
    for (const id of ids ?? []) this.ids.push(id);
    // Without log-probabilities. The text of a chunk itself would not do: it may be that of other tokens.
    const ofIds = texts.length ? texts : (ids ?? []).map(() => null);
    for (const text of ofIds) this.texts.push(text);
  }
}

class Collector {
  #choices = new Map(); // by index
  #prompts = new Map(); // Segments by their place in the request
  #promptIds = null;
  #perPrompt = null; // choices of each of several prompts
  #cameWith = null; // the choice beside which the rows of a stream's prompt come

  /** Takes a body, or a chunk of a stream. */
  take(part) {
    const error = field(part, "error");
    if (error !== null) throw new Error(`the server answered with an error: ${error.message ?? error}`);
    this.#promptIds = listIn(part, "prompt_token_ids", isCount) ?? this.#promptIds;
    const choices = listIn(part, "choices", isChoice) ?? [];
    for (const choice of choices) this.#takeChoice(choice);
    const rows = field(part, "prompt_routed_experts");
    if (rows !== null) this.#takePrompts(choices, rows, field(part, "prompt_routed_expert_weights"));
  }

  #takeChoice(json) {
    const index = json.index ?? 0;
    if (!this.#choices.has(index)) this.#choices.set(index, new Choice(index));
    const choice = this.#choices.get(index);
    choice.promptIds = listIn(json, "prompt_token_ids", isCount) ?? choice.promptIds;
    choice.finished = json.finish_reason ?? choice.finished;
    choice.addTokens(listIn(json, "token_ids", isCount), textsIn(field(json, "logprobs")));
    const rows = field(json, "routed_experts");
    if (rows !== null) choice.append(decode(rows, field(json, "routed_expert_weights")));
  }

  /** Rows of a prompt, or a list with those of each. */
  #takePrompts(choices, rows, weights) {
    const isList = Array.isArray(rows) && !isArray(rows);
    const arrays = isList ? rows.map((one, i) => decode(one, weights?.[i])) : [decode(rows, weights)];
    const perPrompt = choices.length / arrays.length;
    if (!Number.isInteger(perPrompt) || !perPrompt) throw new Error(`${choices.length} choices for ${arrays.length} prompts`);
    if (arrays.length > 1) this.#perPrompt = perPrompt; // a body, which has all choices
    else if ((this.#cameWith ??= choices[0].index) !== choices[0].index) {
      throw new Error("streams of several prompts cannot be told apart: collect them in Python, with n, or send one prompt in a request");
    }
    arrays.forEach((array, i) => {
      const prompt = this.#placeOf(choices[i * perPrompt]);
      if (!this.#prompts.has(prompt)) this.#prompts.set(prompt, new Segment(`prompt ${prompt}`));
      this.#prompts.get(prompt).append(array);
    });
  }

  /** The place of a choice's prompt in the request. */
  #placeOf({ index }) {
    return this.#perPrompt ? Math.floor((index ?? 0) / this.#perPrompt) : 0;
  }

  choices(info) {
    if (!this.#choices.size) throw new Error("it has no choices: it is no response of an endpoint that returns routed experts");
    return Array.from(this.#choices.values(), (choice) => this.#whole(choice, info)).sort((one, other) => one.index - other.index);
  }

  #whole(choice, info) {
    const { index, name, ids, finished } = choice;
    const prompt = this.#promptOf(choice);
    const promptIds = choice.promptIds ?? this.#promptIds;
    const arrays = [...prompt.arrays, ...choice.arrays];
    if (!arrays.length) throw new Error(`${name} has no rows: set return_routed_experts in the request`);
    const start = (prompt.arrays.length ? prompt.start : choice.start) ?? 0;
    const promptLength = prompt.arrays.length ? start + prompt.length : (promptIds?.length ?? null);
    if (promptIds && promptIds.length !== promptLength) throw new Error(`${name}: rows of ${promptLength} prompt tokens, which are ${promptIds.length}`);
    if (prompt.arrays.length && ![null, promptLength].includes(choice.start)) throw new Error(`${name}: rows from ${choice.start} on after a prompt of ${promptLength} tokens`);
    const { rows, weights, shape } = moeLayers(joined(name, arrays), info);
    const end = start + shape[0];
    if (finished && promptLength !== null) checkLength({ name, start, end, promptLength, ids, finished });
    const knownIds = promptLength === null ? null : promptIds ? { start: 0, values: [...promptIds, ...(ids ?? [])] } : { start: promptLength, values: ids ?? [] };
    const tokens = tokensOf(name, knownIds, textsOf(choice, promptLength, end), Math.max(end + 1, promptLength ?? 0));
    return { index, rows, weights, shape, start, tokens, promptLength, finished };
  }

  /** Of a choice; without rows where none of its response has any. */
  #promptOf(choice) {
    const place = this.#placeOf(choice);
    const prompt = this.#prompts.get(place) ?? new Segment("");
    const first = this.#choices.get(place * (this.#perPrompt ?? 0)) ?? choice;
    const isOther = first.promptIds && choice.promptIds && String(first.promptIds) !== String(choice.promptIds);
    if (this.#prompts.size && (isOther || !prompt.arrays.length)) throw new Error(`${choice.name}: the rows of its prompt did not come`);
    return prompt;
  }
}

/** Whether lists are one array of rows, rather than one for each prompt. */
function isArray(json) {
  let depth = 0;
  for (let inner = json; Array.isArray(inner) && inner.length; inner = inner[0]) depth++;
  return depth === 0 || depth === 3;
}

/** The texts of tokens in log-probabilities of a completion, or of a chat. */
function textsIn(logprobs) {
  const texts = logprobs?.content?.map(({ token }) => token) ?? logprobs?.tokens ?? [];
  return texts.map((text) => (typeof text === "string" ? text : null));
}

/** The texts that are known, and the position of the first; null without any. */
function textsOf({ texts, ids }, promptLength, end) {
  const count = promptLength !== null && ids ? promptLength + ids.length : end + 1;
  const start = count - texts.length;
  const isKnown = texts.some((text) => text !== null) && [0, promptLength].includes(start); // with `echo`, those of the prompt too
  return isKnown ? { start, values: texts } : null;
}

/** The rows of arrays, one after the other. */
function joined(name, arrays) {
  const filled = arrays.filter(({ shape }) => shape[0]);
  const [, layers, topK] = (filled[0] ?? arrays[0]).shape;
  const other = filled.find(({ shape }) => shape[1] !== layers || shape[2] !== topK);
  if (other) throw new Error(`${name}: rows of ${other.shape.slice(1)} experts, not ${[layers, topK]}`);
  const weighed = arrays.filter(({ weights }) => weights);
  if (weighed.length && weighed.length < arrays.length) throw new Error(`${name}: weights of some of its rows only`);
  const count = filled.reduce((sum, { shape }) => sum + shape[0], 0);
  const size = layers * topK;
  if (!size) throw new Error(`${name}: an empty array does not say how many layers there are`);
  const rows = new Int16Array(count * size);
  const weights = weighed.length ? new Float32Array(rows.length) : null;
  let at = 0;
  for (const array of filled) {
    rows.set(array.rows, at);
    weights?.set(array.weights, at);
    at += array.rows.length;
  }
  return { rows, weights, shape: [count, layers, topK] };
}

const DENSE_NEED = "its rows include dense layers (routed_experts_layers: all): put the response of GET /v1/routed_experts into a file before it";

/** Rows without the dense layers that `routed_experts_layers: "all"` adds: they have zeros. */
function moeLayers(array, info) {
  const { rows, shape: [count, layers, topK] } = array;
  if (info.top_k && info.top_k !== topK) throw new Error(`rows of ${topK} experts, but the model has ${info.top_k}`);
  const cells = Array.from({ length: count * layers }, (_, i) => rows.subarray(i * topK, (i + 1) * topK));
  const ids = info.layer_ids ?? [];
  // A router never chooses an expert twice for a token, so such a layer is dense. Models of one expert do not show it.
  if (!ids.length && topK > 1 && cells.some((cell) => cell.every((id) => id === 0))) throw new Error(DENSE_NEED);
  const expected = ids.length || info.num_layers || layers;
  if (layers === expected) return array;
  const isOther = (layer) => !ids.includes(layer);
  const hasAll = ids.every((layer) => layer < layers);
  if (!ids.length || !hasAll || cells.some((cell, i) => isOther(i % layers) && cell.some((id) => id > 0))) {
    throw new Error(`rows of ${layers} layers, but the model has ${expected} MoE layers`);
  }
  return { rows: ofLayers(rows, array.shape, ids), weights: array.weights && ofLayers(array.weights, array.shape, ids), shape: [count, ids.length, topK] };
}

/** The values of some layers. */
function ofLayers(values, [count, layers, topK], ids) {
  const kept = new values.constructor(count * ids.length * topK);
  for (let row = 0; row < count; row++) {
    ids.forEach((layer, i) => {
      const at = (row * layers + layer) * topK;
      kept.set(values.subarray(at, at + topK), (row * ids.length + i) * topK);
    });
  }
  return kept;
}

/** All tokens but the last one have rows. */
function checkLength({ name, start, end, promptLength, ids, finished }) {
  const expected = ids ? Math.max(promptLength + ids.length - 1, start) : promptLength;
  const isShort = end < expected && finished !== "abort";
  if (isShort || (ids && end > expected)) throw new Error(`${name}: rows up to ${end}, but its tokens have rows up to ${expected}`);
}

const UNKNOWN = Object.freeze({ id: null, text: null });

/** {id, text} of each position, of which some are known. */
function tokensOf(name, ids, texts, least) {
  const endOf = (known) => (known ? known.start + known.values.length : 0);
  const count = Math.max(least, endOf(ids), endOf(texts));
  if (count > MOST_TOKENS) throw new Error(`${name}: ${count} tokens, but the page shows ${MOST_TOKENS} at most`);
  const tokens = Array(count).fill(UNKNOWN);
  for (const [kind, known] of Object.entries({ id: ids, text: texts })) {
    known?.values.forEach((value, i) => (tokens[known.start + i] = { ...tokens[known.start + i], [kind]: value }));
  }
  return tokens;
}
