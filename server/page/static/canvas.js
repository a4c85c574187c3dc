// What the drawings share.

import { css, ink } from "./colours.js";
import { made } from "./dom.js";

export const GUTTER = 40; // where the layers' numbers stand

/**
 * Fits a canvas to a drawing of `width` × `ownHeight` CSS pixels, at the screen's resolution; its context, cleared. That
 * of a file (figure.js) has a `resolution` of its own, room `below`, and a ground.
 */
export function sized(canvas, width, ownHeight) {
  const isFile = canvas.below !== undefined;
  const ratio = isFile ? (canvas.resolution ?? 1) : devicePixelRatio || 1;
  const height = ownHeight + (canvas.below ?? 0);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  if (isFile) {
    context.fillStyle = ink("surface");
    context.fillRect(0, 0, width, height);
  }
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return context;
}

/** Round numbers, at most `most` of them, between `from` and `to`. */
export function ticks(from, to, most) {
  const rough = (to - from) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

/** Draws the scale of a legend: a ramp, and numbers at equal distances below it. */
export function scale(element, colours, marks) {
  const [canvas, numbers] = element.children;
  const context = sized(canvas, 180, 12);
  colours.forEach((pixel, i) => {
    context.fillStyle = css(pixel);
    context.fillRect((i * 180) / colours.length, 0, 180 / colours.length + 1, 12);
  });
  numbers.replaceChildren(...marks.map((mark) => made("span", {}, mark)));
}

/** The numbers of layers that are `tall` each, as many as there is room for, and the selected one. */
export function layerNumbers(context, { layerIds }, selected, top, tall) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.ceil(13 / tall);
  layerIds.forEach((id, i) => {
    if (i !== selected && (i % every || Math.abs(i - selected) < every)) return;
    context.fillStyle = i === selected ? ink("select") : ink("muted");
    context.fillText(String(id), GUTTER - 6, top + (i + 0.5) * tall);
  });
}

/** The outline of a box [x, y, width, height]. */
export function outline(context, box, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(...box);
}

const picture = document.createElement("canvas");

/**
 * Paints positions `from` to `to`, each `cell` wide, of `layers` that are `tall`: position 0 is at x = 0. `colour(layer,
 * first, end)` gives the pixel of some positions, of several where they share a column of the screen; layers never mix.
 */
export function paint(context, from, to, cell, layers, tall, colour) {
  const step = Math.max(1 / cell, 1);
  const first = Math.floor(from / step);
  const columns = Math.ceil(to / step) - first;
  if (columns <= 0) return;
  const image = new ImageData(columns, layers);
  const pixels = new Uint32Array(image.data.buffer);
  const edges = Array.from({ length: columns + 1 }, (_, i) => Math.min(Math.floor((first + i) * step), Math.ceil(to)));
  for (let layer = 0, at = 0; layer < layers; layer++) {
    for (let i = 0; i < columns; i++) pixels[at++] = colour(layer, edges[i], edges[i + 1]);
  }
  Object.assign(picture, { width: columns, height: layers });
  picture.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, first * step * cell, 0, columns * step * cell, layers * tall);
}
