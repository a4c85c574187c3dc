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
