// What the drawings share.

import { css, ink } from "./colours.js";

export const GUTTER = 40; // where the layers' numbers stand

/** Fits a canvas to `width` × `height` CSS pixels at the screen's resolution; its context, cleared. */
export function sized(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
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

/** Draws a ramp for a legend. */
export function bar(canvas, colours) {
  const context = sized(canvas, 120, 12);
  const step = 120 / colours.length;
  colours.forEach((pixel, i) => {
    context.fillStyle = css(pixel);
    context.fillRect(i * step, 0, step + 1, 12);
  });
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

/** A line through points [x, y]. */
export function line(context, points, colour, width, dash = []) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.beginPath();
  for (const point of points) context.lineTo(...point);
  context.stroke();
  context.setLineDash([]);
}

/** The outline of a box [x, y, width, height]. */
export function outline(context, box, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(...box);
}

const TILE = 1024;
const CELLS_A_FRAME = 30000;

/** A picture with one pixel for each position and layer, which is stretched when it is drawn. */
export class Texture {
  constructor(layers) {
    this.layers = layers;
    this.tiles = [];
    this.painted = 0;
  }

  /** Paints positions `start` to `end`, where `paint(position, layer)` gives a pixel; whether some are left for later. */
  extend(start, end, paint) {
    this.painted = Math.max(this.painted, start);
    let room = Math.ceil(CELLS_A_FRAME / this.layers);
    while (this.painted < end && room > 0) {
      const tile = Math.floor(this.painted / TILE);
      const upTo = Math.min(end, (tile + 1) * TILE, this.painted + room);
      this.#paint(tile, this.painted, upTo, paint);
      room -= upTo - this.painted;
      this.painted = upTo;
    }
    return this.painted < end;
  }

  #paint(tile, from, to, paint) {
    const image = new ImageData(to - from, this.layers);
    const pixels = new Uint32Array(image.data.buffer);
    for (let layer = 0, at = 0; layer < this.layers; layer++) {
      for (let position = from; position < to; position++) pixels[at++] = paint(position, layer);
    }
    if (!this.tiles[tile]) {
      this.tiles[tile] = document.createElement("canvas");
      Object.assign(this.tiles[tile], { width: TILE, height: this.layers });
    }
    this.tiles[tile].getContext("2d").putImageData(image, from - tile * TILE, 0);
  }

  /**
   * Draws positions `from` to `to` (fractions allowed), each `cell` wide, with the first at x. Where several share a pixel,
   * it has their mean if `blends`, else the colour of one of them; layers never mix.
   */
  draw(context, from, to, x, y, cell, height, blends) {
    context.imageSmoothingEnabled = false;
    for (let tile = Math.floor(from / TILE); tile < this.tiles.length && tile * TILE < to; tile++) {
      const first = Math.max(from, tile * TILE);
      const last = Math.min(to, this.painted, (tile + 1) * TILE);
      if (last <= first) continue;
      const { picture, share } = blends ? this.#narrowed(this.tiles[tile], cell) : { picture: this.tiles[tile], share: 1 };
      const left = (first - tile * TILE) * share;
      context.drawImage(picture, left, 0, (last - first) * share, this.layers, x + (first - from) * cell, y, (last - first) * cell, height);
    }
  }

  /** A tile with half as many columns, until they are as wide as a pixel: each is the mean of two neighbours. */
  #narrowed(tile, cell) {
    let [picture, share] = [tile, 1];
    for (; cell / share < 1 && share > 1 / TILE; share /= 2) {
      const half = document.createElement("canvas");
      Object.assign(half, { width: picture.width / 2, height: this.layers });
      half.getContext("2d").drawImage(picture, 0, 0, half.width, half.height);
      picture = half;
    }
    return { picture, share };
  }
}
