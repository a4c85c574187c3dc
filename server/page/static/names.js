// The texts of tokens by their ids, as the server's tokenizer has them.

import { request } from "./stream.js";

const MOST = 16384; // ids in a request
const REST = 1000; // milliseconds between two requests
const texts = new Map(); // by id, of the one model that the server has
let waiting = []; // tokens
let isAsking = false;

/** How often texts have come: what shows texts is drawn again when that has changed. */
export let numArrivals = 0;

/** Gives a token {id, text: null} its text, now or later: one request at a time, for all that wait. */
export async function name(token, changed) {
  if (texts.has(token.id)) token.text = texts.get(token.id);
  else waiting.push(token);
  if (isAsking || !waiting.length) return;
  isAsking = true;
  await null; // the other tokens of the chunk go along
  while (waiting.length) {
    const ids = [...new Set(waiting.map(({ id }) => id))].slice(0, MOST);
    try {
      const said = await (await request("v1/routed_experts/texts", { token_ids: ids })).json();
      ids.forEach((id, i) => texts.set(id, said.texts[i]));
    } catch {
      waiting = []; // ids are shown
    }
    for (const token of waiting) token.text = texts.get(token.id) ?? null;
    waiting = waiting.filter(({ text }) => text === null);
    numArrivals++;
    changed();
    await new Promise((done) => setTimeout(done, REST));
  }
  isAsking = false;
}
