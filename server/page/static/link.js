// The view in the address: what follows #, so that a link brings the same view back.

const REST = 300; // milliseconds: browsers refuse to have the address changed often
let waiting = null;

/** Puts {name: value} into the address, when the keys rest; what is null or empty is left out. */
export function writeLink(fields) {
  clearTimeout(waiting);
  waiting = setTimeout(() => putLink(fields()), REST);
}

/** The same at once. */
export function putLink(fields) {
  const known = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(known)}`);
}

/** {name: text} of the address; null if it says nothing of a view. */
export function readLink() {
  const fields = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return "token" in fields || "layer" in fields ? fields : null;
}

/** A whole number of a link; null if it is none. */
export const numberIn = (text) => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);
