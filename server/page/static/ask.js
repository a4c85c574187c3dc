// Asks the server and feeds what comes into an answer.

import { decode } from "./arrays.js";
import { name } from "./names.js";
import { events, request } from "./stream.js";
import { textOf } from "./tokens.js";

/**
 * `question` = {kind, prompt, maxTokens, temperature, seed}. Calls `begun` once the server has accepted it, and resolves
 * when the answer is whole.
 */
export async function ask(question, model, answer, signal, begun, changed) {
  const said = question.kind === "chat" ? { messages: [{ role: "user", content: question.prompt }] } : { prompt: question.prompt };
  const body = { model, ...said, max_tokens: question.maxTokens, temperature: question.temperature, stream: true };
  if (question.seed !== null) body.seed = question.seed;
  Object.assign(body, { return_routed_experts: true, routed_experts_layers: "moe", return_token_ids: true });
  if (answer.hasWeights) body.return_routed_expert_weights = true;
  const response = await request(question.kind === "chat" ? "v1/chat/completions" : "v1/completions", body, signal);
  begun();
  const told = { isOneByOne: true };
  for await (const chunk of events(response)) {
    take(chunk, answer, told, changed);
    changed();
  }
  answer.finished ??= "no finish reason";
}

function take(chunk, answer, told, changed) {
  const choice = chunk.choices?.[0];
  const prompt = chunk.prompt_token_ids ?? choice?.prompt_token_ids;
  if (prompt && answer.promptLength === null) {
    answer.promptLength = prompt.length;
    addTokens(answer, prompt, null, changed);
  }
  if (chunk.prompt_routed_experts) addRows(answer, chunk.prompt_routed_experts, chunk.prompt_routed_expert_weights);
  if (!choice) return;
  if (choice.routed_experts) addRows(answer, choice.routed_experts, choice.routed_expert_weights);
  const ids = choice.token_ids ?? [];
  addTokens(answer, ids, textOf(choice, ids.length, told), changed);
  if (choice.finish_reason) answer.finished = choice.finish_reason;
}

function addRows(answer, ids, beside) {
  const { rows, weights } = decode(ids, beside);
  answer.addRows(rows, weights);
}

/** `text` is that of one token; the texts of others are asked for. */
function addTokens(answer, ids, text, changed) {
  for (const id of ids) {
    const token = { id, text };
    answer.tokens.push(token);
    if (text === null) name(token, changed);
  }
}
