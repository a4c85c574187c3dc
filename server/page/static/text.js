// The tokens as text, one of them selected.

import { css } from "./colours.js";
import { tipOf } from "./detail.js";
import { made, reveal } from "./dom.js";
import { watchPointer } from "./tip.js";

const ENOUGH = 60; // tokens in a block, which ends at the next line break

export class TokenText {
  constructor(element, side, view, select) {
    this.element = element;
    this.side = side;
    this.reset(null);
    element.addEventListener("click", ({ target }) => {
      const token = target.closest("[data-i]");
      if (token && (view.comparison || this.answer === view.a)) select({ token: Number(token.dataset.i) });
    });
    watchPointer(element, ({ target }) => {
      const token = target.closest("[data-i]");
      return token && tipOf(view, this.answer, Number(token.dataset.i));
    });
  }

  reset(answer) {
    this.answer = answer;
    this.shown = [];
    this.unnamed = []; // positions of tokens without a text, which can come late
    this.selected = null;
    this.block = null;
    this.parted = null;
    this.chosen = ""; // what is marked
    this.tints = []; // pixels of tokens, 0 for none
    this.tinted = ""; // what the tints show
    this.element.replaceChildren();
  }

  /** Shows tokens and texts that are new. */
  draw(token, { isStreaming, firstToken }) {
    const { answer, element } = this;
    const isMore = this.shown.length < answer.tokens.length;
    while (this.shown.length < answer.tokens.length) this.#append(this.#make(this.shown.length));
    this.unnamed = this.unnamed.filter((i) => answer.tokens[i].text === null || this.#fill(this.shown[i], i));
    element.setAttribute("aria-busy", String(isStreaming));
    this.#mark(token);
    if (firstToken !== this.parted && this.shown[firstToken]) {
      this.shown[firstToken].classList.add("parts");
      this.parted = firstToken;
    }
    if (isStreaming && isMore) element.scrollTop = 1e9;
  }

  /** Tokens stand in blocks, so that what cannot be seen costs nothing. Only a line break of the text ends a block. */
  #append(span) {
    const isFull = this.block?.childElementCount >= ENOUGH;
    const isOther = this.answer.begins.has(Number(span.dataset.i)); // of another response
    if (!this.block || isOther || (isFull && this.block.lastChild.textContent.endsWith("\n"))) {
      this.block = made("div", { className: isOther ? "block begins" : "block" });
      this.element.append(this.block);
    }
    this.block.append(span);
  }

  #make(i) {
    const className = i < this.answer.promptLength ? "token prompt" : "token";
    const span = made("span", { id: `token-${this.side}-${i}`, role: "option", className });
    span.dataset.i = i;
    this.#fill(span, i);
    this.shown.push(span);
    if (this.answer.tokens[i].text === null) this.unnamed.push(i);
    return span;
  }

  #fill(span, i) {
    const { text, id } = this.answer.tokens[i];
    const isNumber = text === null && id !== null;
    span.textContent = isNumber ? `#${id}` : (text || "·").replaceAll("\n", "⏎\n");
    span.classList.toggle("number", isNumber);
  }

  #mark(token) {
    if (this.selected === token && this.shown[token]?.classList.contains("selected")) return;
    const before = this.shown[this.selected];
    before?.classList.remove("selected");
    before?.removeAttribute("aria-selected");
    this.selected = token;
    const span = this.shown[token];
    if (!span) return;
    span.classList.add("selected");
    span.ariaSelected = "true";
    this.element.setAttribute("aria-activedescendant", span.id);
  }

  /** Shades the tokens that chose an expert of a layer: all alike, or with weights those most that chose it first. */
  highlight(layer, expert) {
    const key = expert === null ? "" : [layer, expert, this.shown.length, this.answer.length].join();
    if (key === this.chosen) return;
    this.chosen = key;
    this.shown.forEach((span, i) => {
      const choice = expert === null ? undefined : this.answer.choiceOf(i, layer, expert);
      span.classList.toggle("chosen", Boolean(choice));
      if (choice) span.style.setProperty("--shade", 1 - ((choice.rank ?? 1) - 1) / this.answer.topK);
    });
  }

  /** Colours tokens: `colourOf(position)` gives a pixel, 0 for none. `shows` says what colours depend on, besides what has come. */
  tint(shows, colourOf) {
    const key = [shows, this.shown.length, this.answer.length].join();
    if (key === this.tinted) return;
    this.tinted = key;
    this.shown.forEach((span, i) => {
      const pixel = colourOf(i);
      if (pixel === (this.tints[i] ?? 0)) return;
      this.tints[i] = pixel;
      span.classList.toggle("tinted", Boolean(pixel));
      if (pixel) span.style.setProperty("--kind", css(pixel));
    });
  }

  /** Marks the tokens at some positions, a Set. */
  find(positions) {
    this.shown.forEach((span, i) => span.classList.toggle("found", positions.has(i)));
  }

  /** Scrolls so that a token can be seen; again when the blocks that come into sight have their own height. */
  reveal(token) {
    const bring = () => this.shown[token] && reveal(this.shown[token], this.element);
    bring();
    requestAnimationFrame(bring);
  }
}
