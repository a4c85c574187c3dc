// Arrays of rows and of their weights, as the server sends them, and back.

const TYPES = { int16: Int16Array, float32: Float32Array };

/** {rows: Int16Array, weights: Float32Array | null, shape: [n, L, K], start} of an array of ids and one of their weights. */
export function decode(ids, weights) {
  const { shape, start } = ids;
  const rows = valuesOf(ids);
  if (weights == null) return { rows, weights: null, shape, start };
  if (String([weights.shape, weights.start]) !== String([shape, start])) throw new Error("An array of weights does not match the ids beside it.");
  return { rows, weights: valuesOf(weights), shape, start };
}

function valuesOf({ data, dtype, shape }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const values = new TYPES[dtype](bytes.buffer);
  if (values.length !== shape[0] * shape[1] * shape[2]) throw new Error("The number of ids in an array does not match its shape.");
  return values;
}

/** A typed array with the values of one, and room for `needed`. */
export function grown(values, needed) {
  if (needed <= values.length) return values;
  const larger = new values.constructor(Math.max(needed, values.length * 2));
  larger.set(values);
  return larger;
}

/** The form object of rows or their weights, for answers that are saved. */
export function encode(rows, shape, start) {
  const bytes = new Uint8Array(rows.buffer, rows.byteOffset, rows.byteLength);
  const parts = [];
  for (let i = 0; i < bytes.length; i += 0x8000) parts.push(String.fromCharCode(...bytes.subarray(i, i + 0x8000)));
  const isWeights = rows instanceof Float32Array;
  const words = isWeights ? new Int32Array(rows.buffer, rows.byteOffset, rows.length) : rows;
  let missing = 0;
  const size = shape[1] * shape[2];
  for (let row = 0; row < shape[0]; row++) missing += words.subarray(row * size, (row + 1) * size).includes(-1);
  return { data: btoa(parts.join("")), shape, dtype: isWeights ? "float32" : "int16", start, missing };
}
