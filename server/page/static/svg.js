// A canvas that writes SVG: as much of the canvas as the drawings use.

const NAMED = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => NAMED[sign]).replace(/[\u0000-\u0008\u000b-\u001f\ufffe\uffff]/g, "\ufffd");
const ANCHORS = { left: "start", center: "middle", right: "end" };
const BASELINES = { top: "hanging", middle: "central", alphabetic: "alphabetic" };

export class SvgCanvas {
  constructor() {
    this.style = {};
    this.context = new SvgContext();
  }

  getContext() {
    return this.context;
  }

  /** The file, whose title says what it shows. */
  file(title) {
    const [width, height] = [parseFloat(this.style.width), parseFloat(this.style.height)];
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const { body, font } = this.context;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} role="img"><title>${escaped(title)}</title><g style="font: ${escaped(font)}">${body.join("")}</g></svg>\n`;
  }
}

class SvgContext {
  constructor() {
    this.body = [];
    this.clips = 0; // so many have names
    this.states = []; // {x, y, opened} that are saved
    this.#begin();
  }

  #begin() {
    Object.assign(this, { x: 0, y: 0, opened: 0 });
  }

  /** The drawings scale only by the screen's resolution, which a file does not have. */
  setTransform() {
    while (this.states.length) this.restore();
    this.#begin();
  }

  clearRect() {}

  translate(x, y) {
    this.x += x;
    this.y += y;
  }

  save() {
    const { x, y, opened, textAlign, textBaseline, fillStyle, strokeStyle } = this;
    this.states.push({ x, y, opened, textAlign, textBaseline, fillStyle, strokeStyle });
    this.opened = 0;
  }

  restore() {
    this.body.push("</g>".repeat(this.opened));
    Object.assign(this, this.states.pop());
  }

  beginPath() {}

  rect(...box) {
    this.path = this.#box(box);
  }

  clip() {
    const name = `clip-${++this.clips}`;
    this.body.push(`<clipPath id="${name}"><rect ${this.path}/></clipPath><g clip-path="url(#${name})">`);
    this.opened++;
  }

  fillRect(...box) {
    this.body.push(`<rect ${this.#box(box)} fill="${escaped(this.fillStyle)}"/>`);
  }

  strokeRect(...box) {
    this.body.push(`<rect ${this.#box(box)} fill="none" stroke="${escaped(this.strokeStyle)}" stroke-width="${this.lineWidth}"/>`);
  }

  fillText(text, x, y) {
    const place = `x="${this.x + x}" y="${this.y + y}"`;
    const anchors = `text-anchor="${ANCHORS[this.textAlign] ?? "start"}" dominant-baseline="${BASELINES[this.textBaseline] ?? "alphabetic"}"`;
    this.body.push(`<text ${place} ${anchors} fill="${escaped(this.fillStyle)}" xml:space="preserve">${escaped(text)}</text>`);
  }

  /** A picture of cells, which stay sharp. */
  drawImage(canvas, ...box) {
    this.body.push(`<image ${this.#box(box)} preserveAspectRatio="none" style="image-rendering: pixelated" href="${canvas.toDataURL()}"/>`);
  }

  #box([x, y, width, height]) {
    return `x="${this.x + x}" y="${this.y + y}" width="${Math.max(width, 0)}" height="${Math.max(height, 0)}"`;
  }
}
