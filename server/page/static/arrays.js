// Arrays of rows and of their weights, as the server sends them, and back.

const IDS = { int16: Int16Array, uint8: Uint8Array };
const WEIGHTS = { float32: Float32Array };
const READABLE =
  "The page reads rows as objects of int16 or uint8, and as lists. For other forms (npy, raw, int32, references), " +
  "set routed_experts_format to object in the request, or read the file with routed-experts export or in Python.";

/**
 * {rows: Int16Array, weights: Float32Array | null, shape: [n, L, K], start} of an array of ids and one of their weights;
 * lists have no start (null).
 */
export function decode(ids, weights) {
  const { values, shape, start } = arrayOf(ids, IDS);
  const rows = values instanceof Int16Array ? values : Int16Array.from(values);
  if (weights == null) return { rows, weights: null, shape, start };
  const beside = arrayOf(weights, WEIGHTS);
  if (String([beside.shape, beside.start]) !== String([shape, start])) throw new Error("An array of weights does not match the ids beside it.");
  return { rows, weights: beside.values, shape, start };
}

/** The values of an array, of one of the `types` by their names. */
function arrayOf(json, types) {
  if (Array.isArray(json)) return ofLists(json, Object.values(types)[0]);
  if (typeof json?.data !== "string" || !types[json.dtype]) throw new Error(READABLE);
  const { data, dtype, shape, start, missing } = json;
  const values = new types[dtype](bytesOf(data));
  const isShape = Array.isArray(shape) && shape.length === 3 && shape.every(isCount);
  if (!isShape || values.length !== shape[0] * shape[1] * shape[2]) throw new Error("The number of ids in an array does not match its shape.");
  if (!isCount(start)) throw new Error("An array does not say at which token its first row is.");
  const counted = countMissing(values, shape);
  if (missing !== counted) throw new Error(`${counted} rows of an array are not known, said to be ${missing}.`);
  return { values, shape, start };
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

/** The values of an array of int64 or float64. */
export function numbersOf({ data, dtype }) {
  return dtype === "int64" ? Float64Array.from(new BigInt64Array(bytesOf(data)), Number) : new Float64Array(bytesOf(data));
}

const isCount = (value) => Number.isInteger(value) && value >= 0;

/** Of an array as lists of three levels. A weight that is not known is null. */
function ofLists(rows, Type) {
  const shape = [rows.length, rows[0]?.length ?? 0, rows[0]?.[0]?.length ?? 0];
  const areLists = (lists, length) => lists.every((list) => Array.isArray(list) && list.length === length);
  const isArray = areLists(rows, shape[1]) && rows.every((row) => areLists(row, shape[2]));
  const cells = isArray ? rows.flat(2) : [];
  const isCell = Type === Int16Array ? (cell) => Number.isInteger(cell) && Math.abs(cell) < 1 << 15 : (cell) => cell === null || typeof cell === "number";
  if (!isArray || !cells.every(isCell)) throw new Error("Lists of rows must have three levels of equal lengths, and numbers.");
  const values = Type.from(cells);
  if (Type === Float32Array) cells.forEach((cell, i) => cell === null && (wordsOf(values)[i] = -1));
  return { values, shape, start: null };
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
  const dtype = rows instanceof Float32Array ? "float32" : "int16";
  return { data: btoa(parts.join("")), shape, dtype, start, missing: countMissing(rows, shape) };
}

/** How many rows have an unknown id, or the weight of one: -1, or what has its bits. */
function countMissing(values, [count, layers, topK]) {
  const words = wordsOf(values);
  const size = layers * topK;
  let missing = 0;
  for (let row = 0; row < count; row++) missing += words.subarray(row * size, (row + 1) * size).includes(-1);
  return missing;
}

const wordsOf = (values) => (values instanceof Float32Array ? new Int32Array(values.buffer, values.byteOffset, values.length) : values);
