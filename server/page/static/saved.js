// Answers from files: JSON bodies on a line each, one JSON document, or the text of a stream.

import { decode, encode } from "./arrays.js";

/** The choices in a file: [{name, tokens, promptLength, rows, shape: [L, K], start, finished}]. */
export function read(text, file) {
  const found = bodies(text, file).flatMap(({ body, where }) => {
    if (!Array.isArray(body?.choices)) throw new Error(`${where}: not an answer, as it has no choices.`);
    return body.choices.map((choice, i) => {
      try {
        return choiceOf(body, choice, i, where);
      } catch (error) {
        throw new Error(`${where}: ${error.message}`);
      }
    });
  });
  if (!found.length) throw new Error(`${file} has no answers.`);
  return found;
}

function bodies(text, file) {
  if (text.trimStart().startsWith("data:")) return streams(text, file);
  try {
    const body = JSON.parse(text);
    return (Array.isArray(body) ? body : [body]).map((one) => ({ body: one, where: file }));
  } catch {
    return text.split("\n").flatMap((line, i) => (line.trim() ? [{ body: parse(line, `${file}, line ${i + 1}`), where: `${file}, line ${i + 1}` }] : []));
  }
}

function parse(line, where) {
  try {
    return JSON.parse(line);
  } catch {
    throw new Error(`${where}: not JSON.`);
  }
}

/** A stream made a body, with a piece for each chunk. */
function streams(text, file) {
  const found = [];
  let choices = new Map();
  let prompts = [];
  for (const line of text.split("\n")) {
    const data = line.startsWith("data:") ? line.slice(5).trim() : "";
    if (data === "[DONE]") {
      found.push({ body: { choices: [...choices.values()], pieces: prompts }, where: file });
      [choices, prompts] = [new Map(), []];
    } else if (data) takeChunk(parse(data, file), choices, prompts);
  }
  return found;
}

function takeChunk(chunk, choices, prompts) {
  if (chunk.prompt_routed_experts) prompts.push(chunk.prompt_routed_experts);
  for (const part of chunk.choices ?? []) {
    if (!choices.has(part.index)) choices.set(part.index, { index: part.index, pieces: [], token_ids: [], parts: [] });
    const choice = choices.get(part.index);
    if (part.routed_experts) choice.pieces.push(part.routed_experts);
    choice.prompt_token_ids ??= part.prompt_token_ids ?? chunk.prompt_token_ids;
    choice.parts.push({ ids: part.token_ids ?? [], text: part.text ?? part.delta?.content ?? "" });
    choice.finish_reason = part.finish_reason ?? choice.finish_reason;
  }
}

function choiceOf(body, choice, place, where) {
  const many = Array.isArray(body.prompt_routed_experts) && isListOfArrays(body.prompt_routed_experts) ? body.prompt_routed_experts : null;
  const prompt = many ? many[Math.floor((place * many.length) / body.choices.length)] : body.prompt_routed_experts;
  const prompts = (body.pieces ?? (prompt == null ? [] : [prompt])).map(decode);
  const own = (choice.pieces ?? (choice.routed_experts == null ? [] : [choice.routed_experts])).map(decode);
  const arrays = [...prompts, ...own].filter((array) => array.shape[0]);
  if (!arrays.length) throw new Error("no routed_experts: the request must ask with return_routed_experts.");
  const shape = arrays[0].shape.slice(1);
  if (arrays.some((array) => array.shape[1] !== shape[0] || array.shape[2] !== shape[1])) throw new Error("arrays of different shapes.");
  const start = arrays[0].start ?? 0;
  const promptIds = choice.prompt_token_ids ?? body.prompt_token_ids;
  const promptRows = prompts.reduce((sum, array) => sum + array.shape[0], 0);
  const rows = join(arrays.map((array) => array.rows));
  const promptLength = promptIds?.length ?? (prompts.length ? start + promptRows : null);
  const count = rows.length / (shape[0] * shape[1]);
  const tokens = tokensOf(body, choice, promptIds, promptLength, start + count + 1);
  const index = body.choices.length > 1 ? `, choice ${choice.index ?? place}` : "";
  return { name: `${where}${index}`, tokens, promptLength, rows, shape, start, finished: choice.finish_reason ?? "not finished" };
}

/** Of several prompts, and not one array as nested lists. */
const isListOfArrays = (value) => !Array.isArray(value[0]) || Array.isArray(value[0]?.[0]?.[0]);

function join(arrays) {
  const all = new Int16Array(arrays.reduce((sum, array) => sum + array.length, 0));
  let at = 0;
  for (const array of arrays) {
    all.set(array, at);
    at += array.length;
  }
  return all;
}

function tokensOf(body, choice, promptIds, promptLength, end) {
  const promptTexts = body.routed_experts_page?.prompt_tokens;
  const prompt = Array.from({ length: promptLength ?? 0 }, (_, i) => ({ id: promptIds?.[i] ?? null, text: promptTexts?.[i] ?? null }));
  return [...prompt, ...generated(choice, Math.max(end - prompt.length, 0))];
}

function generated(choice, count) {
  if (choice.parts) return choice.parts.flatMap(({ ids, text }) => ids.map((id, i) => ({ id, text: i ? "" : text })));
  const texts = choice.logprobs?.tokens ?? choice.logprobs?.content?.map((entry) => entry.token);
  const ids = choice.token_ids;
  return Array.from({ length: ids?.length ?? texts?.length ?? count }, (_, i) => ({ id: ids?.[i] ?? null, text: texts?.[i] ?? null }));
}

/** An answer as a line that `read` reads. */
export function line(answer) {
  const { layers, topK, start, tokens, size } = answer;
  const prompt = answer.promptLength ?? 0;
  const split = Math.min(Math.max(prompt - start, 0), answer.length);
  const part = (from, to) => encode(answer.rows.subarray(from * size, to * size), [to - from, layers, topK], start + from);
  const [before, after] = [tokens.slice(0, prompt), tokens.slice(prompt)];
  const texts = after.map(({ text }) => text ?? "");
  const choice = { index: 0, text: texts.join(""), token_ids: after.map(({ id }) => id), logprobs: { tokens: texts } };
  return `${JSON.stringify({
    object: "text_completion",
    prompt_token_ids: before.map(({ id }) => id),
    prompt_routed_experts: part(0, split),
    choices: [{ ...choice, finish_reason: answer.finished, routed_experts: part(split, answer.length) }],
    routed_experts_page: { prompt_tokens: before.map(({ text }) => text) },
  })}\n`;
}
