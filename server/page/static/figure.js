// A figure as a file, with its legend: what is shown of it, as SVG or PNG.

import { css, ink } from "./colours.js";
import { save } from "./download.js";
import { SvgCanvas } from "./svg.js";

const LEGEND = 54; // pixels below the figure
const LEFT = 8;
const RAMP = [180, 12];
const RESOLUTION = 3; // pixels of a PNG in one of the screen

/** Saves what a part draws. `legends` are {title, ramp, marks} or {title, swatches: [[name, colour]]}. */
export function saveSvg(part, legends, title, name) {
  const canvas = new SvgCanvas();
  drawOn(canvas, part, legends);
  save(new Blob([canvas.file(title)], { type: "image/svg+xml" }), `${name}.svg`);
}

export function savePng(part, legends, name) {
  const canvas = Object.assign(document.createElement("canvas"), { resolution: RESOLUTION });
  drawOn(canvas, part, legends);
  canvas.toBlob((blob) => save(blob, `${name}.png`));
}

/** Has a part draw on another canvas than its own, which has room for the legends. */
function drawOn(canvas, part, legends) {
  const { canvas: own } = part;
  Object.assign(canvas, { below: LEGEND * legends.length });
  try {
    Object.assign(part, { canvas, shows: null });
    part.draw();
  } finally {
    Object.assign(part, { canvas: own, shows: null });
  }
  const context = canvas.getContext("2d");
  const ratio = canvas.resolution ?? 1;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const top = parseFloat(canvas.style.height) - canvas.below;
  legends.forEach((legend, i) => drawLegend(context, top + i * LEGEND, legend));
}

function drawLegend(context, top, { title, ramp, marks, swatches }) {
  context.textBaseline = "top";
  write(context, title, LEFT, top + 8, "left");
  if (swatches) return drawSwatches(context, top + 26, swatches);
  const [width, height] = RAMP;
  ramp.forEach((pixel, i) => {
    context.fillStyle = css(pixel);
    context.fillRect(LEFT + (i * width) / ramp.length, top + 24, width / ramp.length + 0.5, height);
  });
  const isFirst = (i) => !i || marks.length === 1;
  const align = (i) => (isFirst(i) ? "left" : i === marks.length - 1 ? "right" : "center");
  marks.forEach((mark, i) => write(context, mark, LEFT + (i * width) / Math.max(marks.length - 1, 1), top + 39, align(i)));
}

function drawSwatches(context, top, swatches) {
  let x = LEFT;
  for (const [name, colour] of swatches) {
    context.fillStyle = colour;
    context.fillRect(x, top, 12, 12);
    write(context, name, x + 16, top + 1, "left");
    x += 30 + 7 * String(name).length;
  }
}

function write(context, text, x, y, align) {
  context.textAlign = align;
  context.fillStyle = ink("text");
  context.fillText(String(text), x, y);
}
