// Ramps that differ in lightness first, so that they can be told apart however one sees colours.

const BLUES = ["#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58"];
const ORANGES = ["#f3f4f6", "#fee6ce", "#fdd0a2", "#fdae6b", "#fd8d3c", "#f16913", "#d94801", "#a63603", "#7f2704"];
const ORANGES_ON_DARK = ["#1c2330", "#4a2a12", "#7f3f0c", "#b35806", "#e08214", "#fdb863", "#fed9a6", "#fee8c8", "#fff7ec"];

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function blend(stops, share) {
  const at = share * (stops.length - 1);
  const first = Math.min(Math.floor(at), stops.length - 2);
  const [from, to] = [rgb(stops[first]), rgb(stops[first + 1])];
  return from.map((part, i) => Math.round(part + (to[i] - part) * (at - first)));
}

/** 256 colours of a ramp, as 32-bit pixels of an ImageData (little-endian RGBA). */
const pixels = (stops) => Uint32Array.from({ length: 256 }, (_, i) => pixel(...blend(stops, i / 255)));

/** The colour of one of many kinds: hues and lightnesses that spread evenly, however many there are. */
function kind(i) {
  const [hue, light] = [(i * 0.56984) % 1, 0.38 + 0.44 * ((i * 0.75488) % 1)];
  const part = (shift) => {
    const at = (shift + 12 * hue) % 12;
    return Math.round(255 * (light - 0.6 * Math.min(light, 1 - light) * Math.max(-1, Math.min(at - 3, 9 - at, 1))));
  };
  return pixel(part(0), part(8), part(4));
}

const pixel = (r, g, b) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

export const css = (pixel) => `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;

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

/** The colours of the theme: of the ramps `load`, from none to much, and `differs`, from none to all; `experts(count)`. */
export const ramps = () => (known ??= makeRamps());

function makeRamps() {
  const dark = isDark();
  const kinds = new Map(); // by how many there are
  return {
    unknown: dark ? 0xff7d7d7d : 0xff9a9a9a,
    load: pixels(dark ? BLUES.toReversed() : BLUES),
    differs: pixels(dark ? ORANGES_ON_DARK : ORANGES),
    experts(count) {
      if (!kinds.has(count)) kinds.set(count, Uint32Array.from({ length: count }, (_, i) => kind(i)));
      return kinds.get(count);
    },
  };
}

/** A colour of the style sheet. */
export function ink(name) {
  if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return inks.get(name);
}
