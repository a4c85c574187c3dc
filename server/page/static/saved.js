// Answers from files that are opened here: JSON bodies (on a line each, over lines, in arrays) and streams as curl prints
// them. `routed-experts view` reads files itself, and hands over lines in the one form that it makes of them.

import { decode, encode } from "./arrays.js";
import { textOf } from "./tokens.js";

/**
 * The choices in a file: [{name, model, tokens, promptLength, rows, weights, shape: [L, K], start, finished, info}].
 *
 * `about` is what the file before says about its model. `info` is what is known: some of num_layers, top_k, num_experts,
 * layer_ids, weights_scale.
 */
export function read(text, file, about = {}) {
  const answers = [];
  let own = {}; // what the file's last response with information about its model has
  for (const { parts, where } of documents(text, file)) {
    const [first] = parts;
    if (first?.layer_ids && !first.choices) {
      [about, own] = [first, {}];
      continue;
    }
    own = first?.routed_experts_info ?? own;
    if (!parts.some((part) => Array.isArray(part?.choices))) throw new Error(first?.error?.message ?? `${where}: not a response: it has no choices.`);
    const place = first.routed_experts_page?.where; // in the file that `view` has read
    try {
      answers.push(...choicesOf(parts, place ? `${file}, ${place}` : where, { ...about, ...own }));
    } catch (error) {
      throw new Error(`${where}: ${error.message}`);
    }
  }
  return { answers, about };
}

/** The JSON values of a file; the chunks of a stream are the parts of one. */
function* documents(text, file) {
  let line = 1;
  let stream = null;
  for (let at = 0, end; at < text.length; at = end) {
    const where = `${file}, line ${line}`;
    const lineEnd = text.indexOf("\n", at) + 1 || text.length;
    const head = text.slice(at, Math.min(at + 6, lineEnd)).trimStart();
    if (/^(data:|event:|id:|retry:|:)/.test(head)) {
      end = lineEnd;
      const data = head.startsWith("data:") ? text.slice(at, end).trim().slice(5).trim() : "";
      stream ??= { parts: [], where };
      if (data && data !== "[DONE]") stream.parts.push(parse(data, where));
      if (data === "[DONE]") {
        if (stream.parts.length) yield stream;
        stream = null;
      }
    } else if (/\S/.test(text[at])) {
      if (stream?.parts.length) yield stream;
      stream = null;
      end = endOfValue(text, at);
      const value = parse(text.slice(at, end), where);
      for (const one of Array.isArray(value) ? value : [value]) yield { parts: [one], where };
    } else end = at + 1;
    for (let i = text.indexOf("\n", at); i >= 0 && i < end; i = text.indexOf("\n", i + 1)) line++;
  }
  if (stream?.parts.length) yield stream; // one that was broken off
}

/** The place after the JSON value that begins at a place. */
function endOfValue(text, from) {
  const signs = /\\.|["{}[\]\n]/gs;
  signs.lastIndex = from;
  let [depth, isInString] = [0, false];
  for (let found; (found = signs.exec(text)); ) {
    const [sign] = found;
    if (sign === '"') isInString = !isInString;
    else if (isInString) continue;
    else if (sign === "{" || sign === "[") depth++;
    else if (sign === "}" || sign === "]") {
      depth--;
      if (depth <= 0) return signs.lastIndex;
    } else if (!depth && sign === "\n") return found.index;
  }
  return text.length;
}

function parse(text, where) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${where}: invalid or truncated JSON.`);
  }
}

function choicesOf(parts, where, info) {
  const choices = new Map(); // by index
  const prompts = new Map(); // arrays of a prompt's rows, by the index of the choice that came with them
  for (const part of parts) takePart(part, choices, prompts);
  const perPrompt = Math.max(Math.floor(choices.size / Math.max(prompts.size, 1)), 1);
  const carriers = [...prompts.keys()].sort((a, b) => a - b);
  const page = parts[0].routed_experts_page ?? {};
  return [...choices.values()].map((choice, place) => {
    const prompt = prompts.get(carriers[Math.floor(place / perPrompt)]) ?? [];
    const name = choices.size > 1 ? `${where}, choice ${choice.index}` : where;
    return { name, model: parts[0].model, info, ...choiceOf(choice, prompt, page, info) };
  });
}

function takePart(part, choices, prompts) {
  const list = part.choices ?? [];
  list.forEach((one, place) => {
    const index = one.index ?? place;
    if (!choices.has(index)) choices.set(index, { index, arrays: [], tokens: null, promptIds: null, finish: null, isEchoed: false, told: { isOneByOne: true } });
    const choice = choices.get(index);
    if (one.routed_experts != null) choice.arrays.push(decode(one.routed_experts, one.routed_expert_weights));
    choice.promptIds ??= one.prompt_token_ids ?? part.prompt_token_ids ?? null;
    choice.finish = one.finish_reason ?? choice.finish;
    takeTokens(one, choice);
  });
  if (part.prompt_routed_experts == null) return;
  const arrays = arraysOf(part.prompt_routed_experts);
  const weights = arraysOf(part.prompt_routed_expert_weights);
  arrays.forEach((array, i) => {
    const carrier = list[Math.floor((i * list.length) / arrays.length)]?.index ?? i;
    if (!prompts.has(carrier)) prompts.set(carrier, []);
    prompts.get(carrier).push(decode(array, weights[i]));
  });
}

/** A list has arrays of several prompts, unless it is one array as nested lists. */
const arraysOf = (value) => (Array.isArray(value) && (!Array.isArray(value[0]) || Array.isArray(value[0]?.[0]?.[0])) ? value : [value]);

/** Tokens with the texts of their log-probabilities, which with `echo` are those of the prompt as well, or of the stream. */
function takeTokens(one, choice) {
  const { logprobs, token_ids: ids = null } = one;
  const texts = logprobs?.tokens ?? logprobs?.content?.map(({ token }) => token) ?? null;
  if (!ids && !texts) return;
  const text = textOf(one, (ids ?? texts).length, choice.told);
  const echoed = ids && texts ? texts.length - ids.length : 0;
  choice.isEchoed ||= echoed > 0 || logprobs?.token_logprobs?.[0] === null; // the first of a prompt has none
  choice.tokens ??= [];
  for (let i = 0; i < (texts ?? ids).length; i++) choice.tokens.push({ id: ids?.[i - echoed] ?? null, text: texts ? texts[i] : text });
}

function choiceOf(choice, prompts, page, info) {
  const arrays = [...prompts, ...choice.arrays];
  if (!arrays.length) throw new Error("no routed_experts: the request needs return_routed_experts.");
  const filled = arrays.filter((array) => array.shape[0]);
  const all = (filled[0] ?? arrays[0]).shape.slice(1);
  if (filled.some((array) => array.shape[1] !== all[0] || array.shape[2] !== all[1])) throw new Error("arrays have different shapes.");
  if (filled.some(({ weights }) => !weights !== !filled[0].weights)) throw new Error("only some of its rows have weights.");
  const { rows, shape } = moeLayers(join(filled.map((array) => array.rows)), all, info.layer_ids);
  const weights = filled[0]?.weights ? moeLayers(join(filled.map((array) => array.weights)), all, info.layer_ids).rows : null;
  const count = shape[0] * shape[1] ? rows.length / (shape[0] * shape[1]) : 0;
  const { promptIds, tokens, isEchoed } = choice;
  const isWhole = tokens && choice.finish && choice.finish !== "abort"; // then the last token alone has no row
  const first = isEchoed ? 0 : (promptIds?.length ?? null); // the position of tokens[0]
  const start = arrays[0].start ?? (isWhole && first !== null ? Math.max(first + tokens.length - 1 - count, 0) : 0);
  const promptRows = prompts.reduce((sum, array) => sum + array.shape[0], 0);
  const end = start + count;
  const guessed = isWhole && !isEchoed ? Math.max(end + 1 - tokens.length, 0) : null;
  const promptLength = promptIds?.length ?? (prompts.length ? start + promptRows : guessed);
  const length = tokens && (isEchoed || promptLength !== null) ? tokens.length + (isEchoed ? 0 : promptLength) : end + 1;
  return { tokens: placed(choice, promptLength, length, page), promptLength, rows, weights, shape, start, finished: choice.finish ?? UNFINISHED };
}

/** The tokens by position: what is known of those of the prompt, and of those after it; with `echo`, `tokens` has all. */
function placed({ promptIds, tokens, isEchoed }, promptLength, length, page) {
  const first = isEchoed ? 0 : promptLength;
  const said = (position) => (first === null ? undefined : tokens?.[position - first]);
  return Array.from({ length }, (_, i) => ({
    id: promptIds?.[i] ?? said(i)?.id ?? null,
    text: page.prompt_tokens?.[i] ?? said(i)?.text ?? null,
  }));
}

/** In place of a finish reason. */
export const UNFINISHED = "not finished";

export function join(arrays) {
  const all = new (arrays[0]?.constructor ?? Int16Array)(arrays.reduce((sum, array) => sum + array.length, 0));
  let at = 0;
  for (const array of arrays) {
    all.set(array, at);
    at += array.length;
  }
  return all;
}

/** Rows, or their weights, without the dense layers that answers with all decoder layers have. */
function moeLayers(rows, shape, ids) {
  const [layers, topK] = shape;
  if (!ids || !rows.length || ids.length === layers) return { rows, shape };
  if (Math.max(...ids) >= layers) throw new Error(`rows have ${layers} layers, but the model has ${ids.length} MoE layers.`);
  const isKept = new Set(ids);
  const kept = rows.filter((_, at) => isKept.has(Math.floor(at / topK) % layers));
  return { rows: kept, shape: [ids.length, topK] };
}

/** An answer as a line that `read` reads, and everything else that reads answers. */
export function line(answer) {
  const { layers, topK, start, tokens, size, model, promptLength } = answer;
  const split = Math.min(Math.max((promptLength ?? 0) - start, 0), answer.length);
  const part = (from, to, values = answer.rows) => encode(values.subarray(from * size, to * size), [to - from, layers, topK], start + from);
  const [before, after] = [tokens.slice(0, promptLength ?? 0), tokens.slice(promptLength ?? 0)];
  const texts = (part) => part.map(({ text }) => text);
  const choice = { index: 0, text: texts(after).join(""), routed_experts: part(split, answer.length) };
  const body = { object: "text_completion", model, choices: [choice], routed_experts_info: infoOf(answer) };
  if (answer.weights) choice.routed_expert_weights = part(split, answer.length, answer.weights);
  choice.finish_reason = answer.finished === UNFINISHED ? null : answer.finished;
  if (promptLength !== null) {
    Object.assign(choice, { prompt_token_ids: idsOf(before), token_ids: idsOf(after) });
    body.prompt_routed_experts = part(0, split);
    if (answer.weights) body.prompt_routed_expert_weights = part(0, split, answer.weights);
    body.routed_experts_page = { prompt_tokens: texts(before) };
    choice.logprobs = { tokens: texts(after) };
  }
  return `${JSON.stringify(body)}\n`;
}

/** Undefined, which JSON leaves out, where they are not known. */
const idsOf = (tokens) => (tokens.every(({ id }) => id !== null) ? tokens.map(({ id }) => id) : undefined);

/** What is known about the model, in the names of GET /v1/routed_experts. */
const infoOf = ({ layers, topK, experts, layerIds, knowsExperts, knowsLayers, weightsScale }) => ({
  num_layers: layers,
  top_k: topK,
  num_experts: knowsExperts ? experts : undefined,
  layer_ids: knowsLayers ? layerIds : undefined,
  weights_scale: weightsScale,
});
