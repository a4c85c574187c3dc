// What the page says: to screen readers, in a notice, as an error.

import { $ } from "./dom.js";

let spoken = null;

/** Says it to screen readers, when the keys rest. */
export function say(words) {
  clearTimeout(spoken);
  spoken = setTimeout(() => ($("live").textContent = words), 150);
}

export const notify = (words) => show("notice", words);
export const showError = ({ message }) => show("error", message);
export const hideError = () => show("error", "");

/** Shows words in their place; without any, nothing. */
function show(id, words) {
  $(id).textContent = words;
  $(id).hidden = !words;
  if (words) $(id).scrollIntoView({ block: "nearest" });
}
