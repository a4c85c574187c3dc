// What is shown, as files.

/** Saves a Blob as a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
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

/** The load: a row for each expert of each layer. */
export function loadTable(answer) {
  const { layerIds, experts, counts, sums, hasWeights } = answer;
  const row = (count, at) => {
    const [layer, expert] = [Math.floor(at / experts), at % experts];
    return [layerIds[layer], expert, count, answer.load(layer, expert), ...(hasWeights ? [sums[at]] : [])];
  };
  return [["layer", "expert", "tokens", "load", ...(hasWeights ? ["sum_of_weights"] : [])], Array.from(counts, row)];
}
