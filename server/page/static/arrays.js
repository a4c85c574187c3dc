// The forms of an array of rows on the wire, and back.

const TYPES = { uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, float32: Float32Array };
const NPY = { "|u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<f4": "float32" };
const NPY_MAGIC = "k05VTVBZ"; // base64 of \x93NUMPY

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/**
 * {rows: Int16Array, weights: Float32Array | null, shape: [n, L, K], start: number | null} of an array of ids in any form
 * but `raw`, and one of their weights, if there is one.
 */
export function decode(ids, weights) {
  const { values, shape, start } = parsed(ids);
  const rows = int16(values);
  if (weights == null) return { rows, weights: null, shape, start };
  const beside = parsed(weights);
  if (String([beside.shape, beside.start]) !== String([shape, start])) throw new Error("An array of weights does not match the ids beside it.");
  return { rows, weights: float32(beside.values), shape, start };
}

function int16(values) {
  if (values instanceof Int16Array) return values;
  if (values instanceof Float32Array || values.some((id) => id < -1 || id > 0x7fff)) throw new Error("An array has values that are not expert ids.");
  return Int16Array.from(values);
}

/** Weights; of null, an unknown one, NaN with all bits set as -1 has them. */
function float32(values) {
  if (values instanceof Float32Array) return values;
  if (!Array.isArray(values)) throw new Error("An array of weights is not float32.");
  const weights = Float32Array.from(values);
  const bits = new Int32Array(weights.buffer);
  values.forEach((weight, i) => weight === null && (bits[i] = -1));
  return weights;
}

function parsed(value) {
  if (Array.isArray(value)) {
    const shape = [value.length, value[0]?.length ?? 0, value[0]?.[0]?.length ?? 0];
    return checked(value.flat(2), shape, null);
  }
  if (typeof value === "string") return fromNpy(value);
  return checked(new TYPES[value.dtype](bytesOf(value.data).buffer), value.shape, value.start);
}

function fromNpy(value) {
  if (!value.startsWith(NPY_MAGIC)) {
    throw new Error("The raw format has no shape: request the object format, or run routed-experts view with --num-layers, --top-k and --rows-dtype.");
  }
  const bytes = bytesOf(value);
  const view = new DataView(bytes.buffer);
  const [length, from] = bytes[6] === 1 ? [view.getUint16(8, true), 10] : [view.getUint32(8, true), 12];
  const header = new TextDecoder("latin1").decode(bytes.subarray(from, from + length));
  const type = NPY[/'descr': '([^']+)'/.exec(header)?.[1]];
  const shape = /'shape': \(([^)]*)\)/.exec(header)?.[1].split(",").filter((part) => part.trim()).map(Number);
  if (!type || shape?.length !== 3) throw new Error("An array is not a valid .npy file of rows.");
  return checked(new TYPES[type](bytes.buffer.slice(from + length)), shape, null);
}

function checked(values, shape, start) {
  if (!Number.isInteger(shape[0]) || values.length !== shape[0] * shape[1] * shape[2]) throw new Error("The number of ids in an array does not match its shape.");
  return { values, shape, start };
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
