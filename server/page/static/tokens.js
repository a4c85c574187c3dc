// Tokens and weights as text.

/** Text on one line. */
export const flat = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** A token for a line of text: what would not be seen is written out. */
export const visible = (text) => flat(text).replace(/^ | $/g, "␣");

/** As a sentence begins. */
export const capital = (words) => words[0].toUpperCase() + words.slice(1);

/**
 * The text of the token that a part of a stream brings; null where it is not known which text is whose. `told` =
 * {isOneByOne: whether every part before brought one token and its text}: text that was held back comes with later tokens.
 */
export function textOf({ text, delta }, count, told) {
  const own = text ?? `${delta?.reasoning ?? delta?.reasoning_content ?? ""}${delta?.content ?? ""}`;
  if (count) told.isOneByOne &&= count === 1 && own !== "";
  return told.isOneByOne ? own : null;
}

/** A weight in at most six characters without its sign; whole numbers as such. */
export function weightText(weight) {
  if (Number.isNaN(weight)) return "unknown";
  const size = Math.abs(weight);
  if (size >= 999999.5) return weight.toExponential(1).replace("+", "");
  if (Number.isInteger(weight) || size >= 1000) return weight.toFixed(0);
  return size < 0.001 ? weight.toExponential(0) : size < 1 ? weight.toFixed(3) : weight.toPrecision(4);
}
