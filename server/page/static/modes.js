// What the colours of tokens mean, in the text and in the map: one mode for both.

import { css, differs, ink, ramps } from "./colours.js";
import { made } from "./dom.js";
import { scale } from "./canvas.js";
import { weightText } from "./tokens.js";
import { hasRanks } from "./view.js";

const UNKNOWN = -1; // in place of a share
const known = new WeakMap(); // by answer: {key, shares}
const MANY = 32; // experts, from which on seven colours say little

/**
 * Each mode by its name: whether it needs weights, the value of a token in a layer as a share from 0 to 1 (or the expert
 * whose colour it has), what of the view that depends on, and what its scale says.
 */
const MODES = {
  expert: { needsWeights: false, expert: expertOf },
  unusual: {
    needsWeights: false,
    share: shareOfUnusual,
    dependsOn: ({ busiest }) => busiest.number,
    marks: ({ a }) => ["0", `${a.topK} of ${a.topK}`],
  },
  chosen: {
    needsWeights: false,
    share: shareOfSelected,
    dependsOn: ({ expert, layer }) => [expert, layer],
    marks: () => ["not chosen", "chosen"],
  },
  largest: {
    needsWeights: true,
    share: shareOfLargest,
    dependsOn: mostOf,
    marks: (view) => ["0", weightText(mostOf(view))],
  },
  entropy: {
    needsWeights: true,
    share: entropyOf,
    dependsOn: () => "",
    marks: () => ["0: one has all", "1: all equal"],
  },
};

const TITLES = {
  largest: "Largest weight",
  entropy: "Entropy of the weights",
  unusual: "Experts outside the busiest with ¾ of the layer’s choices",
};

/** The mode that is chosen, if the responses have what it needs; else one that tells tokens apart. */
export function modeOf({ mode, busiest }) {
  if (mode && (!MODES[mode].needsWeights || hasRanks())) return mode;
  return busiest.experts > MANY ? "unusual" : "expert";
}

export const isMode = (name) => Object.hasOwn(MODES, name ?? "");
export const needsWeights = (name) => MODES[name].needsWeights;

/** A function (answer, layer, first, end) that gives the pixel of some positions in a layer, 0 where nothing is known. */
export function colouring(view) {
  const { expert, share, dependsOn } = MODES[modeOf(view)];
  if (expert) {
    return (answer, layer, position) => {
      const id = expert(view, answer, layer, position);
      return id < 0 ? 0 : view.busiest.colour(layer, id);
    };
  }
  const key = [modeOf(view), dependsOn(view)].join();
  let last = null; // answer
  let shares = null; // its shares
  return (answer, layer, first, end) => {
    if (answer !== last) shares = sharesOf(answer, key);
    last = answer;
    let sum = 0;
    let count = 0;
    for (let position = first; position < end; position++) {
      const at = (position - answer.start) * answer.layers + layer;
      if (Number.isNaN(shares[at])) shares[at] = share(view, answer, layer, position);
      if (shares[at] === UNKNOWN) continue;
      sum += shares[at];
      count++;
    }
    return count ? differs(sum / count) : 0;
  };
}

/** The shares of an answer's cells as far as they have been looked at, else NaN: the map is drawn many times. */
function sharesOf(answer, key) {
  const needed = answer.length * answer.layers;
  const before = known.get(answer);
  if (before?.key === key && before.shares.length >= needed) return before.shares;
  const shares = new Float32Array(Math.ceil(1.5 * needed)).fill(NaN);
  if (before?.key === key) shares.set(before.shares);
  known.set(answer, { key, shares });
  return shares;
}

const isKnown = (answer, layer, position) => {
  const ids = answer.cell(position, layer);
  return ids.length > 0 && !ids.includes(-1);
};

/** Of the largest weight or the chosen rank; without weights the least busy of those that have a colour. */
function expertOf({ busiest, rank }, answer, layer, position) {
  const ids = answer.cell(position, layer);
  if (!ids.length) return -1;
  return hasRanks() ? answer.expertOfRank(position, layer, Math.min(rank, answer.topK)) : busiest.among(layer, ids);
}

/** 1 where the selected expert was chosen, or less where it had a lower rank. In another layer its number is another expert's. */
function shareOfSelected({ expert, layer: own }, answer, layer, position) {
  if (expert === null || layer !== own || !isKnown(answer, layer, position)) return UNKNOWN;
  const choice = answer.choiceOf(position, layer, expert);
  return choice ? 1 - ((choice.rank ?? 1) - 1) / answer.topK : 0;
}

function mostOf({ a, b }) {
  return Math.max(a.mostWeight, b?.mostWeight ?? 0);
}

function shareOfLargest(view, answer, layer, position) {
  if (!isKnown(answer, layer, position)) return UNKNOWN;
  const [largest] = answer.choices(position, layer);
  if (Number.isNaN(largest.weight)) return UNKNOWN;
  return Math.max(largest.weight, 0) / (mostOf(view) || 1);
}

/** Of the weights as shares of their sum: 0 if one expert has all, 1 if all have the same. */
function entropyOf(_, answer, layer, position) {
  if (!isKnown(answer, layer, position)) return UNKNOWN;
  const weights = Array.from(answer.cell(position, layer, answer.weights), (weight) => Math.max(weight, 0));
  const sum = weights.reduce((one, other) => one + other, 0);
  if (!(sum > 0) || weights.length < 2) return UNKNOWN;
  const parts = weights.filter((weight) => weight > 0).map((weight) => weight / sum);
  return -parts.reduce((total, part) => total + part * Math.log(part), 0) / Math.log(weights.length);
}

/** How many of the experts are not among those that the layer usually chooses. */
function shareOfUnusual({ busiest }, answer, layer, position) {
  if (!isKnown(answer, layer, position)) return UNKNOWN;
  const ids = answer.cell(position, layer);
  let unusual = 0;
  for (const id of ids) if (!busiest.isUsual(layer, id)) unusual++;
  return unusual / ids.length;
}

/** What the colours of the selected layer mean: {title, ramp, marks}, or {title, swatches: [[name, colour]]}. */
export function meaningOf(view) {
  const { a, layer, expert } = view;
  const mode = modeOf(view);
  if (mode === "expert") return { title: `Experts of ${a.layerName(layer)}:`, swatches: swatchesOf(view) };
  if (mode === "chosen" && expert === null) return { title: "Select an expert, to see which tokens chose it.", swatches: [] };
  const title = mode === "chosen" ? `Expert ${expert} of ${a.layerName(layer)}` : TITLES[mode];
  return { title, ramp: ramps().differs, marks: MODES[mode].marks(view) };
}

function swatchesOf({ a, b, busiest, layer }) {
  const kinds = busiest.ofLayer[layer].map((expert) => [expert, css(busiest.colour(layer, expert))]);
  const isAnyUnknown = Boolean(a.missing || b?.missing);
  return [...kinds, ["others", ink("rest")], ...(isAnyUnknown ? [["unknown", ink("empty")]] : [])];
}

/** Says it on the page. */
export function explain(element, view) {
  const { title, ramp, marks, swatches } = meaningOf(view);
  const shows = [title, marks, swatches, ink("surface")].join();
  if (shows === element.dataset.shows) return;
  element.dataset.shows = shows;
  if (swatches) {
    const spans = swatches.map(([name, colour]) => made("span", {}, made("i", { style: `background: ${colour}` }), String(name)));
    return element.replaceChildren(title, ...spans);
  }
  const bar = made("span", { className: "scale" }, made("canvas", { ariaHidden: "true" }), made("span"));
  element.replaceChildren(title, bar);
  scale(bar, ramp, marks);
}
