// Helpers for the document.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children. */
export function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Sets a text, only where it changes: the browser would lay the page out anew. */
export function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

const ROOM = 24; // pixels beyond a row that is brought into sight

/** Scrolls a frame, and nothing around it, so that a row of its table can be seen below the header. */
export function reveal(row, frame) {
  const [box, around] = [row.getBoundingClientRect(), frame.getBoundingClientRect()];
  const top = around.top + (frame.querySelector("thead")?.offsetHeight ?? 0);
  if (box.top < top) frame.scrollTop -= top - box.top + ROOM;
  else if (box.bottom > around.bottom - ROOM) frame.scrollTop += box.bottom - around.bottom + ROOM;
}
