// Colours that can be told apart however one sees colours: each palette is a published one.

// Okabe and Ito, "Color Universal Design" (2008), without black.
const KINDS = "#e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7".split(" ");
// ColorBrewer 2.0, RdBu from its end: white in the middle.
const RD_BU = "#053061 #2166ac #4393c3 #92c5de #d1e5f0 #f7f7f7 #fddbc7 #f4a582 #d6604d #b2182b #67001f".split(" ");
// Crameri, "Scientific colour maps" (2018), berlin: black in the middle.
const BERLIN = "#9eb0ff #62a6e0 #3280a6 #20526a #112732 #190c09 #371000 #61200b #964a36 #ca7b71 #ffadad".split(" ");

// For loads below the even share: what is hardly used must not be louder than what is used most.
const QUIET = { light: RD_BU.slice(3, 5), dark: BERLIN.slice(3, 5) };

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const pixel = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

export const css = (pixel) => `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;

function blend(stops, share) {
  const at = share * (stops.length - 1);
  const first = Math.min(Math.floor(at), stops.length - 2);
  const [from, to] = [rgb(stops[first]), rgb(stops[first + 1])];
  return from.map((part, i) => Math.round(part + (to[i] - part) * (at - first)));
}

/** 257 colours of a ramp, one of them in its middle, as 32-bit pixels of an ImageData (little-endian RGBA). */
const pixels = (stops) => Uint32Array.from({ length: 257 }, (_, i) => pixel(blend(stops, i / 256)));

const isDark = () => {
  const { theme } = document.documentElement.dataset;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
};

let known = null; // ramps of the theme
let inks = new Map();

/** To be called when the theme may have changed. */
export function forgetTheme() {
  known = null;
  inks = new Map();
}

/** The colours of the theme: `kinds`, the last for all experts without their own; `load`, quiet below its middle; `diverging`; `differs`, from none to all. */
export const ramps = () => (known ??= makeRamps());

function makeRamps() {
  const stops = isDark() ? BERLIN : RD_BU;
  const below = pixels([...(isDark() ? QUIET.dark : QUIET.light), stops[5]]).filter((_, i) => i % 2 === 0);
  const above = pixels(stops.slice(5)).filter((_, i) => i % 2 === 0);
  return {
    load: Uint32Array.of(...below, ...above.subarray(1)),
    kinds: Uint32Array.from([...KINDS, ink("rest")], (hex) => pixel(rgb(hex))),
    diverging: pixels(stops),
    differs: pixels(stops.slice(5)),
  };
}

/** The colour of a ramp for -1 to 1, or for 0 to 1 where it has one direction. */
const onBothSides = (ramp, value) => ramp[128 + Math.round(128 * Math.min(Math.max(value, -1), 1))];
export const diverging = (value) => onBothSides(ramps().diverging, value);
export const ofLoad = (value) => onBothSides(ramps().load, value);
export const differs = (share) => ramps().differs[Math.round(256 * share)];

/** A colour of the style sheet. */
export function ink(name) {
  if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return inks.get(name);
}

const USUAL = 3 / 4; // of all choices are those of a layer's usual experts

/** Of experts, the busiest first, as many as have that share together. */
function usualOf(experts, count) {
  const all = experts.reduce((sum, expert) => sum + count(expert), 0);
  const usual = new Set();
  let sum = 0;
  for (const expert of experts) {
    if (sum >= USUAL * all) break;
    usual.add(expert);
    sum += count(expert);
  }
  return usual;
}

let counted = 0;

/** Which experts have a colour of their own: the busiest of each layer. And which are usual. */
export class Busiest {
  /** Counts what there is of the answers that are shown. */
  constructor(answers) {
    this.number = ++counted; // of all such counts
    this.experts = Math.max(...answers.map(({ experts }) => experts));
    this.rows = answers.reduce((sum, { length }) => sum + length, 0);
    const count = (layer, expert) => answers.reduce((sum, answer) => sum + answer.count(layer, expert), 0);
    const chosen = answers[0].layerIds.map((_, layer) => {
      const counts = Array.from({ length: this.experts }, (_, expert) => [expert, count(layer, expert)]);
      const most = counts.filter(([, count]) => count).sort(([, one], [, other]) => other - one);
      return most.map(([expert]) => expert);
    });
    this.ofLayer = chosen.map((experts) => experts.slice(0, KINDS.length));
    this.usual = chosen.map((experts, layer) => usualOf(experts, (expert) => count(layer, expert)));
    this.places = new Uint8Array(this.ofLayer.length * this.experts).fill(KINDS.length); // in the palette, by layer and expert
    this.ofLayer.forEach((busiest, layer) => busiest.forEach((expert, i) => (this.places[layer * this.experts + expert] = i)));
  }

  /** Whether an expert is one of the busiest that have most of their layer's choices together. */
  isUsual(layer, expert) {
    return this.usual[layer].has(expert);
  }

  /**
   * Of the experts of a cell, the least busy that has a colour, because the busiest ones are in most cells; any other if
   * none has one, and -1 if they are not known.
   */
  among(layer, ids) {
    let best = ids[0];
    let bestPlace = -1;
    for (const id of ids) {
      const place = this.places[layer * this.experts + id];
      if (id < 0 || place === KINDS.length || place < bestPlace) continue;
      best = id;
      bestPlace = place;
    }
    return best;
  }

  /** The colour of an expert that is known. */
  colour(layer, expert) {
    return ramps().kinds[this.places[layer * this.experts + expert]];
  }
}
