// Sends the prompt to the server, and feeds what comes into an answer.

import { Answer } from "./answer.js";
import { decode } from "./arrays.js";
import { $ } from "./dom.js";
import { hideError, say } from "./messages.js";
import { name as nameToken } from "./names.js";
import { begin } from "./responses.js";
import { UNFINISHED } from "./saved.js";
import { failed, server } from "./server.js";
import { events, request } from "./stream.js";
import { textOf, visible } from "./tokens.js";
import { changed, view } from "./view.js";
import { summary } from "./words.js";

let asked = 0;

/** Sends what the form says; `begun` is called once the server has accepted it. */
export async function send(begun) {
  hideError();
  view.request?.abort();
  const ownRequest = new AbortController();
  view.request = ownRequest;
  const { info } = server;
  const prompt = visible($("prompt").value);
  const name = `${++asked}: ${prompt.length > 30 ? `${prompt.slice(0, 29)}…` : prompt || "(empty)"}`;
  const answer = new Answer({ name, info, model: info.model, hasWeights: Boolean(info.weights) });
  $("stop").disabled = false;
  try {
    const isChat = $("kind").value === "chat";
    const response = await request(isChat ? "v1/chat/completions" : "v1/completions", bodyOf(isChat, answer), ownRequest.signal);
    begun();
    begin(answer);
    say("Generating.");
    const told = { isOneByOne: true };
    for await (const chunk of events(response)) {
      take(chunk, answer, told);
      changed();
    }
    answer.finished ??= "no finish reason";
    say(`Response complete: ${summary(answer, "")}`);
  } catch (error) {
    answer.finished ??= error.name === "AbortError" ? "abort" : UNFINISHED;
    if (error.name !== "AbortError") failed(error);
  } finally {
    if (view.request === ownRequest) view.request = null;
    $("stop").disabled = !view.request;
    changed();
  }
}

export const stop = () => view.request?.abort();

function bodyOf(isChat, { model, hasWeights }) {
  const prompt = $("prompt").value;
  return {
    model,
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    seed: $("seed").value === "" ? undefined : Number($("seed").value),
    stream: true,
    return_token_ids: true,
    // All that changes what comes, whatever the server's own defaults are.
    return_routed_experts: true,
    routed_experts_prompt_start: 0,
    routed_experts_format: "object",
    routed_experts_dtype: "int16",
    routed_experts_layout: "split",
    routed_experts_layers: "moe",
    routed_experts_delivery: "inline",
    routed_experts_stream: "with_tokens",
    return_routed_expert_weights: hasWeights || undefined,
  };
}

function take(chunk, answer, told) {
  const choice = chunk.choices?.[0];
  const prompt = chunk.prompt_token_ids ?? choice?.prompt_token_ids;
  if (prompt && answer.promptLength === null) {
    answer.promptLength = prompt.length;
    addTokens(answer, prompt, null);
  }
  if (chunk.prompt_routed_experts) addRows(answer, chunk.prompt_routed_experts, chunk.prompt_routed_expert_weights);
  if (!choice) return;
  if (choice.routed_experts) addRows(answer, choice.routed_experts, choice.routed_expert_weights);
  const ids = choice.token_ids ?? [];
  addTokens(answer, ids, textOf(choice, ids.length, told));
  if (choice.finish_reason) answer.finished = choice.finish_reason;
}

function addRows(answer, ids, beside) {
  const { rows, weights } = decode(ids, beside);
  answer.addRows(rows, weights);
}

/** `text` is that of one token; the texts of others are asked for. */
function addTokens(answer, ids, text) {
  for (const id of ids) {
    const token = { id, text };
    answer.tokens.push(token);
    if (text === null) nameToken(token, changed);
  }
}
