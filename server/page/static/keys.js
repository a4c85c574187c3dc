// What the arrow keys do on the map, the texts and the load.

import { $ } from "./dom.js";
import { load, map } from "./drawing.js";
import { say } from "./messages.js";
import { select, view } from "./view.js";
import { cellInWords, loadInWords } from "./words.js";

const PAGE = 50; // tokens

const ALONG = {
  ArrowLeft: ({ token }) => ({ token: token - 1 }),
  ArrowRight: ({ token }) => ({ token: token + 1 }),
  PageUp: ({ token }) => ({ token: token - PAGE }),
  PageDown: ({ token }) => ({ token: token + PAGE }),
  Home: () => ({ token: 0 }),
  End: () => ({ token: Infinity }),
};
const expertBy = (by) => ({ layer, expert }) => ({ layer, expert: load.beside(layer, expert, by) });
const sameExpert = (by) => ({ layer, expert }) => ({ layer: layer + by, expert: expert ?? 0 });
const OF_LOAD = {
  ArrowLeft: expertBy(-1),
  ArrowRight: expertBy(1),
  ArrowUp: sameExpert(-1),
  ArrowDown: sameExpert(1),
  Escape: ({ layer }) => ({ layer, expert: null }),
};

const ZOOMS = { "+": () => map.zoomBy(1.5), "-": () => map.zoomBy(1 / 1.5), 0: () => map.setZoom("fit") };

export function watchKeys() {
  $("map").addEventListener("keydown", ({ key, ctrlKey, metaKey }) => ctrlKey || metaKey || ZOOMS[key]?.());
  onKeys("map", { ...ALONG, ArrowUp: ({ layer }) => ({ layer: layer - 1 }), ArrowDown: ({ layer }) => ({ layer: layer + 1 }) }, cellInWords);
  for (const id of ["tokens-a", "tokens-b"]) onKeys(id, ALONG, cellInWords);
  onKeys("load", OF_LOAD, loadInWords);
}

/** Each key selects what its step gives, and screen readers hear it. */
function onKeys(id, steps, words) {
  $(id).addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step || !view.a || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    select(step(view));
    say(words(view));
  });
}
