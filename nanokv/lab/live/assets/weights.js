"use strict";
// The package's model.safetensors in base64 → {name: Float32Array}. The file begins with the length
// of its JSON header (8 bytes); the header has the place of each tensor. bf16 is the upper half of
// a float32, so nothing is rounded here.

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

function readSafetensors(bytes) {
  const size = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size)));
  delete header.__metadata__;
  return Object.fromEntries(
    Object.entries(header).map(
      ([
        name,
        {
          dtype,
          data_offsets: [from, to],
        },
      ]) => {
        if (dtype !== "BF16") throw new Error(`${name} is ${dtype}: this page reads BF16`);
        return [name, widened(bytes.slice(8 + size + from, 8 + size + to))];
      },
    ),
  );
}

function widened(bytes) {
  // bf16 → float32: append 16 zero bits
  const halves = new Uint16Array(bytes.buffer);
  const values = new Float32Array(halves.length);
  const bits = new Uint32Array(values.buffer);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return values;
}
