// The texts of tokens by their ids, as the server's tokenizer has them.

import { postJson } from "./stream.js";

const AT_ONCE = 4; // requests
const texts = new Map(); // by id, of the one model that the server has

/** Gives the tokens of an answer their texts as these become known; without the endpoint their ids are shown. */
export class Names {
  constructor(model, changed) {
    Object.assign(this, { model, changed });
    this.waiting = new Map(); // tokens by id
    this.queue = [];
    this.asking = 0;
  }

  /** Sets the text of a token {id, text}, now or later. */
  give(token) {
    if (texts.has(token.id)) token.text = texts.get(token.id);
    else if (this.waiting.has(token.id)) this.waiting.get(token.id).push(token);
    else {
      this.waiting.set(token.id, [token]);
      this.queue.push(token.id);
      this.#ask();
    }
  }

  async #ask() {
    if (this.asking === AT_ONCE || !this.queue.length) return;
    this.asking++;
    const id = this.queue.shift();
    try {
      texts.set(id, await textOf(id, this.model));
      for (const token of this.waiting.get(id)) token.text = texts.get(id);
      this.waiting.delete(id);
      this.changed();
    } catch {
      this.queue = [];
    }
    this.asking--;
    this.#ask();
  }
}

/** The second of two equal tokens: many tokenizers drop the space that the first token of a text begins with. */
async function textOf(id, model) {
  const { prompt } = await postJson("detokenize", { model, tokens: [id, id] });
  return prompt.slice(Math.floor(prompt.length / 2));
}
