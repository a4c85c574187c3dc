// Asks the server and feeds what comes into an answer.

import { decode } from "./arrays.js";
import { Names } from "./names.js";
import { events } from "./stream.js";

/** `question` = {kind, prompt, maxTokens, temperature, seed}. Resolves when the answer is whole. */
export async function ask(question, model, answer, signal, changed) {
  const said = question.kind === "chat" ? { messages: [{ role: "user", content: question.prompt }] } : { prompt: question.prompt };
  const body = { model, ...said, max_tokens: question.maxTokens, temperature: question.temperature, stream: true };
  if (question.seed !== null) body.seed = question.seed;
  Object.assign(body, { return_routed_experts: true, routed_experts_layers: "moe", return_token_ids: true });
  if (answer.hasWeights) body.return_routed_expert_weights = true;
  const path = question.kind === "chat" ? "v1/chat/completions" : "v1/completions";
  const names = new Names(model, changed);
  for await (const chunk of events(path, body, signal)) {
    take(chunk, answer, names);
    changed();
  }
  answer.finished ??= "no finish reason";
}

/** A chunk's text is not used: which of its tokens it belongs to is not known, nor whether some was held back. */
function take(chunk, answer, names) {
  const choice = chunk.choices?.[0];
  const prompt = chunk.prompt_token_ids ?? choice?.prompt_token_ids;
  if (prompt && answer.promptLength === null) {
    answer.promptLength = prompt.length;
    addTokens(answer, prompt, names);
  }
  if (chunk.prompt_routed_experts) addRows(answer, chunk.prompt_routed_experts, chunk.prompt_routed_expert_weights);
  if (!choice) return;
  if (choice.routed_experts) addRows(answer, choice.routed_experts, choice.routed_expert_weights);
  addTokens(answer, choice.token_ids ?? [], names);
  if (choice.finish_reason) answer.finished = choice.finish_reason;
}

function addRows(answer, ids, beside) {
  const { rows, weights } = decode(ids, beside);
  answer.addRows(rows, weights);
}

function addTokens(answer, ids, names) {
  for (const id of ids) {
    const token = { id, text: null };
    answer.tokens.push(token);
    names.give(token);
  }
}
