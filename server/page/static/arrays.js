// The forms of an array of rows on the wire, and back.

const TYPES = { uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array };
const NPY = { "|u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32" };
const NPY_MAGIC = "k05VTVBZ"; // base64 of \x93NUMPY

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/**
 * {rows: Int16Array, shape: [n, L, K], start: number | null} of an array in any form. `raw` = {num_layers, top_k,
 * rows_dtype} is needed for the form that does not say them.
 */
export function decode(value, raw = {}) {
  if (Array.isArray(value)) {
    const shape = [value.length, value[0]?.length ?? 0, value[0]?.[0]?.length ?? 0];
    return checked(value.flat(2), shape, null);
  }
  if (typeof value === "string") {
    return value.startsWith(NPY_MAGIC) ? fromNpy(bytesOf(value)) : fromRaw(bytesOf(value), raw);
  }
  return checked(new TYPES[value.dtype](bytesOf(value.data).buffer), value.shape, value.start);
}

function fromRaw(bytes, { num_layers: layers, top_k: topK, rows_dtype: dtype }) {
  if (!layers || !topK || !dtype) {
    throw new Error("The raw format has no shape: request the object format, or run routed-experts view with --num-layers, --top-k and --rows-dtype.");
  }
  const ids = new TYPES[dtype](bytes.buffer);
  return checked(ids, [ids.length / (layers * topK), layers, topK], null);
}

function fromNpy(bytes) {
  const view = new DataView(bytes.buffer);
  const [length, from] = bytes[6] === 1 ? [view.getUint16(8, true), 10] : [view.getUint32(8, true), 12];
  const header = new TextDecoder("latin1").decode(bytes.subarray(from, from + length));
  const type = NPY[/'descr': '([^']+)'/.exec(header)?.[1]];
  const shape = /'shape': \(([^)]*)\)/.exec(header)?.[1].split(",").filter((part) => part.trim()).map(Number);
  if (!type || shape?.length !== 3) throw new Error("An array is not a valid .npy file of rows.");
  return checked(new TYPES[type](bytes.buffer.slice(from + length)), shape, null);
}

function checked(ids, shape, start) {
  if (!Number.isInteger(shape[0]) || ids.length !== shape[0] * shape[1] * shape[2]) throw new Error("The number of ids in an array does not match its shape.");
  return { rows: ids instanceof Int16Array ? ids : Int16Array.from(ids), shape, start };
}

/** The form object of rows, for answers that are saved. */
export function encode(rows, shape, start) {
  const bytes = new Uint8Array(rows.buffer, rows.byteOffset, rows.byteLength);
  const parts = [];
  for (let i = 0; i < bytes.length; i += 0x8000) parts.push(String.fromCharCode(...bytes.subarray(i, i + 0x8000)));
  let missing = 0;
  const size = shape[1] * shape[2];
  for (let row = 0; row < shape[0]; row++) missing += rows.subarray(row * size, (row + 1) * size).includes(-1);
  return { data: btoa(parts.join("")), shape, dtype: "int16", start, missing };
}
