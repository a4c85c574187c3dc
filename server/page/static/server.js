// The server that this page comes from: what it has, and its key.

import { $ } from "./dom.js";
import { hideError, showError } from "./messages.js";
import { ServerError, request, useKey } from "./stream.js";

/** `info` is what the server says of its rows; null without a server. */
export const server = { info: null };
let hasKey = false;

export async function connect() {
  try {
    server.info = await (await request("v1/routed_experts")).json();
  } catch (error) {
    return failed(error);
  }
  const { model, num_layers, top_k, num_experts } = server.info;
  hideError();
  $("key-form").hidden = true;
  $("model").textContent = `${model}: ${num_layers} MoE layers, top ${top_k} of ${num_experts} experts`;
  $("ask").hidden = $("profile").hidden = false;
  if (matchMedia("(min-width: 700px)").matches) $("prompt").focus();
}

export function setKey() {
  useKey($("key").value);
  $("key").value = "";
  hasKey = true;
  connect();
}

export function askForKey() {
  $("key-form").hidden = false;
  $("ask").hidden = true;
  $("key").value = "";
  $("key").focus();
}

/** Shows why a request failed; asks for another key if it is that. */
export function failed(error) {
  const needsKey = error instanceof ServerError && error.status === 401;
  if (needsKey) askForKey();
  showError(needsKey ? new Error(hasKey ? "The server rejected this API key." : "The server requires an API key.") : error);
}
