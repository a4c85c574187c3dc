// The view in the address: what follows #, so that a link brings the same view back.

import { $ } from "./dom.js";
import { map } from "./drawing.js";
import { notify } from "./messages.js";
import { isMode } from "./modes.js";
import { EXAMPLE, hasExample, openExample, responseOf, show } from "./responses.js";
import { select, view } from "./view.js";

const REST = 300; // milliseconds: browsers refuse to have the address changed often
const ORDERS = ["number", "load", "likeness"];
const UNSAVED = "a response that was not saved";

let waiting = null;
let link = readLink(); // until what it names is open

/** {name: text} of the address; null if it says nothing of a view. */
function readLink() {
  const fields = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return "token" in fields || "layer" in fields ? fields : null;
}

/** A whole number; null if a text is none. */
export const numberIn = (text) => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);

/** Puts the view into the address, when the keys rest. */
export function writeLink() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const known = Object.entries(linkFields()).filter(([, value]) => value !== null && value !== undefined && value !== "");
    history.replaceState(null, "", `#${new URLSearchParams(known)}`);
  }, REST);
}

/** The view in words of a link; only responses from files can be named. */
function linkFields() {
  if (link) return { ...link };
  const { a, b, layer, token, expert, mode, columns, rank, byWeight } = view;
  const name = (answer) => answer && (answer.file ? answer.name : UNSAVED);
  const fields = { a: name(a), b: name(b), token, layer: a.layerIds[layer], expert, mode, columns: columns === "number" ? null : columns };
  return { ...fields, rank: rank > 1 ? rank : null, by: byWeight ? "weights" : null, zoom: map.zoom };
}

/** What was picked or sent since is shown in place of what the link says. */
export function forgetLink() {
  link = null;
}

/** Another address was entered. */
export function followAddress() {
  link = readLink();
  return followLink();
}

/** Shows what the link says, if the responses that it names are open; else says which files to open. */
export async function followLink() {
  if (!link) return;
  const fields = link;
  const absent = () => [fields.a, fields.b].filter((name) => name && !responseOf(name));
  if (absent().includes(UNSAVED)) {
    link = null;
    return notify(`This link shows ${UNSAVED}: links carry no responses.`);
  }
  if (absent().some((name) => name.startsWith(EXAMPLE)) && !hasExample()) await openExample();
  const names = absent();
  notify(names.length ? `This link shows ${names.join(" and ")}: open ${names.length > 1 ? "these files" : "this file"} to see it.` : "");
  if (names.length || !view.a) return;
  link = null;
  view.mode = isMode(fields.mode) ? fields.mode : null;
  const controls = { rank: numberIn(fields.rank) ?? 1, by: fields.by === "weights" ? "weights" : "choices", columns: ORDERS.includes(fields.columns) ? fields.columns : "number" };
  for (const [id, value] of Object.entries(controls)) {
    $(id).value = value;
    $(id).dispatchEvent(new Event("input"));
  }
  show(responseOf(fields.a) ?? view.a, responseOf(fields.b) ?? (fields.a ? null : view.b));
  const expert = numberIn(fields.expert);
  const layer = Math.max(view.a.layerIds.indexOf(numberIn(fields.layer)), 0);
  select({ layer, expert: expert < view.a.experts ? expert : null, token: numberIn(fields.token) ?? view.token });
  map.setZoom(fields.zoom === "fit" ? "fit" : Number(fields.zoom) || null);
}
