// Tokens and words as text.

/** Text on one line. */
export const flat = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** A token for a line of text: what would not be seen is written out. */
export const visible = (text) => flat(text).replace(/^ | $/g, "␣");

/** As a sentence begins. */
export const capital = (words) => words[0].toUpperCase() + words.slice(1);

/** A weight in about five characters. */
export function weightText(weight) {
  if (Number.isNaN(weight)) return "unknown";
  if (weight === 0) return "0";
  const size = Math.abs(weight);
  return size < 0.001 ? weight.toExponential(0) : size < 1 ? weight.toFixed(3) : weight.toPrecision(4);
}
