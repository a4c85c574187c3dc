// Tokens and words as text.

/** A token for a line of text: what would not be seen is written out. */
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");

/** As a sentence begins. */
export const capital = (words) => words[0].toUpperCase() + words.slice(1);
