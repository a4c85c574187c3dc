// Tokens that contain a text, or stand in a range: marked, visited one by one, and compared with the whole.

import { $ } from "./dom.js";
import { markFound } from "./drawing.js";
import { say } from "./messages.js";
import { comparePart } from "./responses.js";
import { select, view } from "./view.js";
import { cellInWords } from "./words.js";

/** The positions of the first response whose tokens contain what is looked for. */
function found() {
  const text = $("find").value;
  if (!view.a || !text) return [];
  return view.a.tokens.map((_, position) => position).filter((position) => view.a.text(position).includes(text));
}

/** Marks what is found, and says how much it is. */
function show() {
  const positions = found();
  markFound(positions);
  $("found").textContent = $("find").value ? `${positions.length} of ${view.a?.tokens.length ?? 0} tokens` : "";
  $("next-found").disabled = $("compare-found").disabled = !positions.length;
}

function goToNext() {
  const positions = found();
  if (!positions.length) return;
  select({ token: positions.find((position) => position > view.token) ?? positions[0] });
  say(cellInWords(view));
}

function compareRange() {
  const [first, last] = [Number($("range-first").value), Number($("range-last").value)];
  const count = Math.max(Math.min(last, view.a.end - 1) - first + 1, 0);
  comparePart(`Tokens ${first} to ${last}`, Array.from({ length: count }, (_, i) => first + i));
}

export function watchFinding() {
  $("find").addEventListener("input", show);
  $("find").addEventListener("keydown", (event) => event.key === "Enter" && goToNext());
  $("next-found").addEventListener("click", goToNext);
  $("compare-found").addEventListener("click", () => comparePart(`Tokens with “${$("find").value}”`, found()));
  $("range").addEventListener("submit", (event) => {
    event.preventDefault();
    if (view.a) compareRange();
  });
}
