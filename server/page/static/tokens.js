// The text of tokens, from the vocabulary's way of writing them.

/** GPT-2's alphabet, in which byte-level vocabularies are written: character to byte. */
function byteAlphabet() {
  const printable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  const bytes = new Map();
  let next = 256;
  for (let byte = 0; byte < 256; byte++) bytes.set(String.fromCharCode(printable(byte) ? byte : next++), byte);
  return bytes;
}

const BYTES = byteAlphabet();

/** Texts of tokens as a tokenizer's vocabulary has them, such as "Ġthe" or "▁the". */
export function readable(vocabulary) {
  const isByteLevel = vocabulary.some((token) => /[ĠĊ]/.test(token));
  return vocabulary.map((token) => {
    if (!isByteLevel) return token.replaceAll("▁", " ").replaceAll("<0x0A>", "\n");
    const bytes = Array.from(token, (character) => BYTES.get(character));
    return bytes.includes(undefined) ? token : new TextDecoder().decode(Uint8Array.from(bytes));
  });
}

/** A token for a line of text: what would not be seen is written out. */
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
