// What the page says: to screen readers, in a notice, as an error.

import { $ } from "./dom.js";

let spoken = null;

/** Says it to screen readers, when the keys rest. */
export function say(words) {
  clearTimeout(spoken);
  spoken = setTimeout(() => ($("live").textContent = words), 150);
}

/** Shows a notice; without words, none. */
export function notify(words) {
  $("notice").textContent = words || "";
  $("notice").hidden = !words;
}

export function showError(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}

export function hideError() {
  $("error").hidden = true;
}
