// The lines of what comes in pieces.

/** The lines of a stream of bytes, without their ends. Text that is not UTF-8 is an error. */
export async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream("utf-8", { fatal: true })).getReader();
  let pieces = []; // of a line: joined once, as a response may be one line of many MB
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const [first, ...others] = value.split("\n");
    pieces.push(first);
    for (const begin of others) {
      yield pieces.join("");
      pieces = [begin];
    }
  }
  yield pieces.join("");
}
