// Requests to the server that this page comes from. The API key lives here, and nowhere else.

import { linesOf } from "./lines.js";

let key = null;

export const useKey = (value) => {
  key = value;
};

/** An answer of the server that is not a success. `status` is that of HTTP, 0 where the server cannot be reached. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response to a request, `POST` if it has a body; whatever is not a success is a ServerError. */
export async function request(path, body, signal) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "Cannot reach the server.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let said = text.slice(0, 500);
  try {
    const { error, detail } = JSON.parse(text);
    said = error?.message ?? error ?? detail ?? said;
  } catch {
    // not JSON: said as it is
  }
  throw new ServerError(response.status, `The server returned ${response.status}: ${said}`);
}

/** The JSON of each event of a response that is a stream of server-sent events, up to [DONE]. */
export async function* events(response) {
  for await (const line of linesOf(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(200, event.error.message ?? String(event.error));
    yield event;
  }
  throw new ServerError(0, "The stream ended before the response was complete.");
}
