// The pool as a grid of pages, and one request as rows of pages.
//
// A request has a letter, a colour and a pattern, each of which is enough to recognise it.

const FREE = -1;
const KEPT_PAGES = -2;
const SHARED = -3;
const COLOURS = ["--one", "--two", "--three", "--four", "--five"];
const PATTERNS = ["plain", "slanted", "level", "upright"];
const letters = new Map(); // id → number of the request's letter, the lowest that is free

function nameAll(requests) {
  const present = new Set(requests.map(({ id }) => id));
  for (const id of letters.keys()) {
    if (!present.has(id)) letters.delete(id);
  }
  for (const { id } of requests) {
    const taken = new Set(letters.values());
    if (!letters.has(id)) letters.set(id, span(taken.size + 1).find((n) => !taken.has(n)));
  }
}

function letterOf(id) {
  const n = letters.get(id);
  const letter = String.fromCharCode(65 + (n % 26));
  return n < 26 ? letter : letter + Math.floor(n / 26);
}

function hatch(pen, x, y, w, h, pattern) {
  if (pattern === "plain") return;
  pen.save();
  pen.beginPath();
  pen.rect(x, y, w, h);
  pen.clip();
  pen.beginPath();
  const far = Math.max(w, h);
  for (let d = 2; d < 2 * far; d += 4) {
    if (pattern === "slanted") line(pen, x, y + d, x + d, y);
    if (pattern === "level") line(pen, x, y + d, x + w, y + d);
    if (pattern === "upright") line(pen, x + d, y, x + d, y + h);
  }
  pen.strokeStyle = "#00000050";
  pen.lineWidth = 1;
  pen.stroke();
  pen.restore();
}

function line(pen, fromX, fromY, toX, toY) {
  pen.moveTo(fromX, fromY);
  pen.lineTo(toX, toY);
}

function box(pen, x, y, w, h, { fill, pattern = "plain", text = "", frame = "" }) {
  pen.fillStyle = colour(fill);
  pen.fillRect(x, y, w, h);
  hatch(pen, x, y, w, h, pattern);
  if (frame) {
    pen.strokeStyle = colour(frame);
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 0.75, y + 0.75, w - 1.5, h - 1.5);
  }
  if (!text || h < 9) return;
  pen.fillStyle = colour(fill === "--card" ? "--ink" : "--on");
  pen.font = `700 ${Math.min(12, h - 2)}px ${LETTERS.slice(5)}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, x + w / 2, y + h / 2 + 0.5);
}

function ownerLook(owner, requests) {
  if (owner === FREE) return { fill: "--free" };
  if (owner === KEPT_PAGES) return { fill: "--kept", pattern: "slanted" };
  if (owner === SHARED) return { fill: "--card", pattern: "level", text: "+", frame: "--ink" };
  const { id, whose } = requests[owner];
  const n = letters.get(id);
  return {
    fill: COLOURS[n % COLOURS.length],
    pattern: PATTERNS[n % PATTERNS.length],
    text: letterOf(id),
    frame: whose === "tab" ? "--ink" : "",
  };
}

const unrolled = (cells) => cells.flatMap(([owner, n]) => Array(n).fill(owner));

function drawPool(canvas, { cells, requests }, room) {
  const all = unrolled(cells);
  const fitting = Math.floor(Math.sqrt((room * 190) / all.length)); // about 190 pixels high
  const size = Math.max(9, Math.min(24, fitting));
  const across = Math.max(1, Math.floor(room / size));
  const pen = canvas.getContext("2d");
  sized(canvas, across * size, Math.ceil(all.length / across) * size);
  all.forEach((owner, n) => {
    const x = (n % across) * size;
    const y = Math.floor(n / across) * size;
    box(pen, x, y, size - 1, size - 1, ownerLook(owner, requests));
  });
}

function swatch(look) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  sized(canvas, 18, 18);
  box(canvas.getContext("2d"), 0, 0, 18, 18, look);
  return canvas;
}

// --- one request ---------------------------------------------------------------------------------

const PARTS = {
  reused: { fill: "--reused", pattern: "slanted" },
  computed: { fill: "--new" },
  answer: { fill: "--answer" },
  absent: { fill: "--free" },
};
const MOST_ROWS = 14;

// The part of PARTS for each token of a request, in order.
function tokensOf({ prompt, reused, generated, reason, held, kept }) {
  const inCache = reason ? kept : held; // the newest token of an answer is fed in the next step
  const counts = [["reused", reused], ["computed", prompt - reused], ["answer", generated]];
  const parts = counts.flatMap(([part, n]) => Array(n).fill(part));
  return parts.map((part, i) => (i < inCache ? part : "absent"));
}

// Each group of cells is a page. Of many rows only the last MOST_ROWS are drawn.
function drawTokens(canvas, request, pageSize, room) {
  const all = tokensOf(request);
  const cell = Math.max(1, Math.min(16, Math.floor((room - 4) / pageSize)));
  const gap = cell > 3 ? 1 : 0;
  const wide = cell * pageSize + 4; // of a page
  const tall = 14;
  const across = Math.max(1, Math.floor((room + 4) / wide)); // pages per row
  const each = across * pageSize; // tokens per row
  const rows = Math.ceil(all.length / each);
  const first = Math.max(0, rows - MOST_ROWS);
  const pen = canvas.getContext("2d");
  sized(canvas, Math.min(room, across * wide), Math.max(1, rows - first) * (tall + 3));
  all.slice(first * each).forEach((part, i) => {
    const n = i % each;
    const x = n * cell + Math.floor(n / pageSize) * 4;
    const y = Math.floor(i / each) * (tall + 3);
    const isLast = first * each + i === all.length - 1;
    const newest = isLast && request.generated && !request.reason;
    const frame = newest && cell > 3 ? "--ink" : "";
    box(pen, x, y, cell - gap, tall, { ...PARTS[part], frame });
  });
  return first * across; // pages that are not drawn
}
