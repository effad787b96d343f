// Arrays of numpy from their files, as the binary tensors of the V2 protocol.

const MAGIC = "\x93NUMPY";

/** Types of numpy, little-endian, and the datatypes that have the same bytes. */
const DATATYPES = {
  "|b1": "BOOL",
  "|u1": "UINT8",
  "<u2": "UINT16",
  "<u4": "UINT32",
  "<u8": "UINT64",
  "|i1": "INT8",
  "<i2": "INT16",
  "<i4": "INT32",
  "<i8": "INT64",
  "<f2": "FP16",
  "<f4": "FP32",
  "<f8": "FP64",
};

/** Return datatype, shape and elements of a file; throws an error that says what it is instead. */
export function readNpy(buffer) {
  const bytes = new Uint8Array(buffer);
  const text = (from, to) => String.fromCharCode(...bytes.subarray(from, to));
  if (text(0, 6) !== MAGIC) throw new Error("expected a .npy file");
  const long = bytes[6] >= 2;
  const view = new DataView(buffer);
  const start = long ? 12 : 10;
  const end = start + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = text(start, end);
  const descr = /'descr':\s*'([^']+)'/.exec(header)?.[1];
  const shape = /'shape':\s*\(([^)]*)\)/.exec(header)?.[1];
  const datatype = DATATYPES[descr];
  if (!datatype || shape === undefined) {
    throw new Error(`expected numbers in little-endian order, got an array of ${descr ?? "objects"}`);
  }
  if (/'fortran_order':\s*True/.test(header)) {
    throw new Error("expected C order, got Fortran order");
  }
  const sizes = shape.split(",").map((each) => each.trim()).filter(Boolean).map(Number);
  const data = bytes.subarray(end);
  const wanted = sizes.reduce((all, size) => all * size, 1) * Number(descr.slice(2));
  if (data.length !== wanted) throw new Error(`expected ${wanted} bytes, got ${data.length}`);
  return { datatype, shape: sizes, data };
}

/** Return one element of BYTES, with its length in front (binary tensor data extension). */
export function oneElement(buffer) {
  const data = new Uint8Array(4 + buffer.byteLength);
  new DataView(data.buffer).setUint32(0, buffer.byteLength, true);
  data.set(new Uint8Array(buffer), 4);
  return { datatype: "BYTES", shape: [1], data };
}
