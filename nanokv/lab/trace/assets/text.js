"use strict";
// Texts: numbers with units, and tokens with every character visible.

const count = (n) => n.toLocaleString("en-US");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

function figures(value, digits = 4) {
  if (value === undefined || value === null) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4
    ? value.toExponential(digits - 2)
    : value.toPrecision(digits);
}

function bytes(n) {
  const units = [
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ];
  for (const [size, unit] of units) if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  return `${n} B`;
}

const span = (n) => Array.from({ length: n }, (_, i) => i);
const byteSigns = (piece) =>
  piece.replace(/(\\x[0-9a-f]{2})+/g, (run) => `‹${run.slice(2).replaceAll("\\x", " ")}›`);
const quoted = (piece) => `“${byteSigns(/^ +$/.test(piece) ? spaced(piece) : piece)}”`;
const spaced = (piece) => piece.replaceAll(" ", "␣");

// A token on an axis: spaces are visible, long runs are counted, bytes are written as ‹e2 96›, and
// the text is cut at `most` characters.
function short(piece, most = 10) {
  const letters = [
    ...byteSigns(spaced(piece).replace(/(.)\1{4,}/gu, (run, one) => `${one}×${[...run].length}`)),
  ];
  return letters.length > most
    ? `${letters.slice(0, most - 1).join("")}…`
    : letters.join("") || "∅";
}
