// What is shown, as files.

import { ink } from "./colours.js";

/** Saves a Blob as a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A canvas, on the background that it has on the page. */
export function savePng(canvas, name) {
  const copy = document.createElement("canvas");
  Object.assign(copy, { width: canvas.width, height: canvas.height });
  const context = copy.getContext("2d");
  context.fillStyle = ink("surface");
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  copy.toBlob((blob) => save(blob, name));
}

/** Rows of values; what is not known is empty. */
export function saveCsv(header, rows, name) {
  const lines = [header, ...rows].map((row) => `${row.map(field).join(",")}\n`);
  save(new Blob(lines, { type: "text/csv" }), name);
}

function field(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const text = String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** A token's text as JSON: every character can be told, and no spreadsheet takes it for a formula. */
export const quoted = (text) => JSON.stringify(text);

/** The map as a table [header, rows]: a row for each token, the ids of a layer in one field, and their weights in another. */
export function mapTable(answer) {
  const { layerIds, rows, weights, tokens } = answer;
  const sides = weights ? { experts: rows, weights } : { experts: rows };
  const header = ["position", "token", "token_id", ...Object.keys(sides).flatMap((what) => layerIds.map((id) => `${what}_${id}`))];
  const row = ({ id }, i) => {
    const cells = Object.values(sides).flatMap((values) => layerIds.map((_, layer) => answer.cell(i, layer, values).join(" ")));
    return [i, quoted(answer.text(i)), id, ...cells];
  };
  return [header, tokens.map(row)];
}

/** The load: a row for each expert of each layer. */
export function loadTable(answer) {
  const { layerIds, experts, counts, sums, hasWeights } = answer;
  const row = (count, at) => {
    const [layer, expert] = [Math.floor(at / experts), at % experts];
    return [layerIds[layer], expert, count, answer.load(layer, expert), ...(hasWeights ? [sums[at]] : [])];
  };
  return [["layer", "expert", "tokens", "load", ...(hasWeights ? ["sum_of_weights"] : [])], Array.from(counts, row)];
}
