// Files of saved responses: JSON, JSON lines, or streams as curl prints them. And a response as a line of such a file.

import { encode } from "./arrays.js";
import { choicesOf } from "./collect.js";
import { linesOf } from "./lines.js";

/** In place of a finish reason. */
export const UNFINISHED = "not finished";

const INFO = ["num_layers", "top_k", "num_experts", "layer_ids", "weights_scale"];

/** Reads one file after another. What is known of a model holds for the files after it. */
export class Reader {
  constructor(info = {}) {
    this.info = info;
  }

  /** The choices in a file, a stream of bytes: what `choicesOf` gives, with {name, file, model, info}. */
  async *read(file, stream) {
    let ofFile = {}; // what a response says about those after it
    let isEmpty = true;
    for await (const { line, parts } of partsIn(file, stream)) {
      isEmpty = false;
      const place = `${file}, line ${line}`;
      try {
        const bodies = parts.map(withoutEnvelope);
        if (!bodies.every(isObject)) throw new Error("not a response of the server: it must be a JSON object");
        const [first] = bodies;
        if (first.layer_ids && !first.choices) {
          this.info = infoOf(first);
          ofFile = {};
          continue;
        }
        if ("routed_experts_info" in first) ofFile = infoOf(first.routed_experts_info);
        const info = { ...this.info, ...ofFile };
        const model = typeof first.model === "string" ? first.model : null;
        const choices = choicesOf(bodies, info);
        for (const { index, finished, ...rest } of choices) {
          const name = choices.length > 1 ? `${place}, choice ${index}` : place;
          yield { name, file, model, info, ...rest, finished: finished ?? UNFINISHED };
        }
      } catch (error) {
        throw new Error(`${place}: ${error.message}`);
      }
    }
    if (isEmpty) throw new Error(`${file} has no responses.`);
  }
}

const isObject = (json) => json?.constructor === Object;

/** The response in a line of a batch's output. */
function withoutEnvelope(json) {
  const body = json?.custom_id != null ? json.response?.body : null;
  return body == null ? json : withoutEnvelope(body);
}

/** What a document says of a model, in the names of GET /v1/routed_experts. */
function infoOf(document) {
  if (!isObject(document)) throw new Error("routed_experts_info must be an object");
  const known = Object.fromEntries(INFO.map((name) => [name, document[name]]).filter(([, value]) => value != null));
  for (const name of ["num_layers", "top_k", "num_experts"]) {
    const isSize = Number.isInteger(known[name]) && known[name] > 0 && known[name] <= 1 << 15;
    if (name in known && !isSize) throw new Error(`${name} must be a positive integer up to ${1 << 15}, not ${known[name]}`);
  }
  const ids = known.layer_ids;
  const isAscending = Array.isArray(ids) && ids.length && ids.every((id, i) => Number.isInteger(id) && id > (ids[i - 1] ?? -1));
  if (ids && !isAscending) throw new Error(`layer_ids must be ascending layer indices, not ${ids}`);
  return known;
}

const EVENT = /^(data|event|id|retry)?:/;

/** The responses (or other JSON) in a file: {line, where it begins, and its parts: the body, or the chunks of a stream}. */
async function* partsIn(file, stream) {
  const values = new Values();
  let number = 0;
  let line = 0; // where a response begins
  let chunks = null; // of the stream that has begun
  const cutOff = () => new Error(`${file}, line ${line}: the stream that starts here was cut off: it does not end with [DONE]`);
  for await (const text of decoded(file, stream)) {
    number++;
    const trimmed = text.trim();
    if (!trimmed) continue;
    if (!values.hasBegun && EVENT.test(trimmed)) {
      if (!chunks) [line, chunks] = [number, []];
      const data = trimmed.startsWith("data:") ? trimmed.slice(5).trim() : "";
      if (data && data !== "[DONE]") chunks.push(parsed(file, line, data));
      if (data !== "[DONE]") continue;
      if (chunks.length) yield { line, parts: chunks };
      chunks = null;
      continue;
    }
    if (chunks?.length) throw cutOff();
    chunks = null;
    for (const value of values.feed(trimmed, number)) {
      const json = parsed(file, value.line, value.text);
      for (const one of Array.isArray(json) ? json : [json]) yield { line: value.line, parts: [one] };
    }
  }
  if (chunks?.length) throw cutOff();
  if (values.hasBegun) parsed(file, values.line, values.text);
}

async function* decoded(file, stream) {
  try {
    yield* linesOf(stream);
  } catch (error) {
    throw new Error(`${file} cannot be read as UTF-8 text: open responses as the server sends them, one per line. (${error.message})`);
  }
}

function parsed(file, line, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${file}, line ${line} is not valid JSON, or was cut off: ${error.message}`);
  }
}

const MARKS = /"[^"\\]*(?:\\.[^"\\]*)*"?|[{}[\]]/g; // a string, or a bracket

/** Cuts JSON values out of lines: a value may take several lines, and a line have several values. */
class Values {
  text = ""; // of the value that has begun
  line = 0; // where it has begun
  #depth = 0;

  get hasBegun() {
    return this.text !== "";
  }

  /** The values that end in a line. */
  *feed(text, number) {
    let from = 0;
    for (const { 0: mark, index } of text.matchAll(MARKS)) {
      if (mark.length > 1 || mark === '"') continue;
      this.#depth += "{[".includes(mark) ? 1 : -1;
      if (this.#depth > 0) continue;
      yield this.#take(text.slice(from, index + 1), number);
      from = index + 1;
    }
    const rest = text.slice(from);
    if (!rest.trim()) return;
    if (!this.hasBegun) this.line = number;
    this.text += `${rest}\n`;
    if (!this.#depth) yield this.#take("", number); // no object: what it is, JSON.parse says
  }

  #take(text, number) {
    const value = { text: this.text + text, line: this.hasBegun ? this.line : number };
    this.text = "";
    this.#depth = 0;
    return value;
  }
}

/** An answer as a line that everything reads that reads responses. */
export function line(answer) {
  const { layers, topK, start, tokens, size, model, promptLength } = answer;
  const split = Math.min(Math.max((promptLength ?? 0) - start, 0), answer.length);
  const part = (from, to, values = answer.rows) => encode(values.subarray(from * size, to * size), [to - from, layers, topK], start + from);
  const [before, after] = [tokens.slice(0, promptLength ?? 0), tokens.slice(promptLength ?? 0)];
  const choice = { index: 0, text: after.map(({ text }) => text).join(""), routed_experts: part(split, answer.length) };
  choice.logprobs = { tokens: tokens.map(({ text }) => text) }; // the prompt's too, as with `echo`
  const body = { object: "text_completion", model, choices: [choice], routed_experts_info: knownOf(answer) };
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

const knownOf = ({ info }) => Object.fromEntries(INFO.map((name) => [name, info[name]]));
