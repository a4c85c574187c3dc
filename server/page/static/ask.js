// Asks the server and feeds what comes into an answer.

import { decode } from "./arrays.js";
import { events, postJson } from "./stream.js";
import { readable } from "./tokens.js";

/** `question` = {kind, prompt, maxTokens, temperature, seed}. Resolves when the answer is whole. */
export async function ask(question, model, answer, signal, changed) {
  const said = question.kind === "chat" ? { messages: [{ role: "user", content: question.prompt }] } : { prompt: question.prompt };
  const body = { model, ...said, max_tokens: question.maxTokens, temperature: question.temperature, stream: true };
  if (question.seed !== null) body.seed = question.seed;
  Object.assign(body, { return_routed_experts: true, routed_experts_layers: "moe", return_token_ids: true });
  const path = question.kind === "chat" ? "v1/chat/completions" : "v1/completions";
  for await (const chunk of events(path, body, signal)) {
    take(chunk, answer, () => name(answer, model, said, changed));
    changed();
  }
  answer.finished ??= "no reason given";
}

function take(chunk, answer, named) {
  const choice = chunk.choices?.[0];
  const prompt = chunk.prompt_token_ids ?? choice?.prompt_token_ids;
  if (prompt && answer.promptLength === null) {
    answer.promptLength = prompt.length;
    answer.tokens = prompt.map((id) => ({ id, text: null }));
    named();
  }
  if (chunk.prompt_routed_experts) answer.addRows(decode(chunk.prompt_routed_experts).rows);
  if (!choice) return;
  if (choice.routed_experts) answer.addRows(decode(choice.routed_experts).rows);
  const { text, delta } = choice;
  addTokens(answer, choice.token_ids ?? [], text ?? delta?.content ?? delta?.reasoning ?? delta?.reasoning_content ?? "");
  if (choice.finish_reason) answer.finished = choice.finish_reason;
}

/** The text of several tokens at once cannot be told apart: the first has it. */
function addTokens(answer, ids, text) {
  ids.forEach((id, i) => answer.tokens.push({ id, text: i ? "" : text }));
  const last = answer.tokens.at(-1);
  if (!ids.length && text && last && answer.tokens.length > answer.promptLength) last.text = (last.text ?? "") + text;
}

/** Finds the texts of the prompt's tokens; without them their numbers are shown. */
async function name(answer, model, said, changed) {
  try {
    const { tokens, token_strs: texts } = await postJson("tokenize", { model, ...said, return_token_strs: true });
    if (!texts || tokens.length !== answer.promptLength || tokens.some((id, i) => id !== answer.tokens[i].id)) return;
    readable(texts).forEach((text, i) => (answer.tokens[i].text = text));
    answer.renamed = true;
    changed();
  } catch {
    // The server may not have the endpoint.
  }
}
