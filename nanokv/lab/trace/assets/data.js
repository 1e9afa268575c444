// The recording: base64 → numbers, and lookups such as the row at position 7 after step 3.

const DATA = JSON.parse(document.getElementById("data").textContent);
const MODEL = DATA.model;
const ROLES = { s: "system", u: "user", a: "answer", p: "prompt" };

const HALF = Float32Array.from({ length: 65536 }, (_, bits) => {
  const sign = bits >> 15 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
});

function decode({ kind, scale, data }) {
  // Plain loops, because a callback for each of millions of numbers is slow.
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  if (kind === "f4") return new Float32Array(bytes.buffer);
  const halves = new Uint16Array(bytes.buffer);
  const values = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i++) values[i] = HALF[halves[i]] * scale;
  return values;
}

class Recording {
  constructor(run) {
    Object.assign(this, {
      tokens: run.tokens,
      steps: run.steps,
      stopped: run.stopped,
      promptLength: run.promptLength,
    });
    this.arrays = run.arrays;
    for (const name in run.arrays) this[name] = decode(run.arrays[name]);
    this.before = [0]; // tokens fed before each step
    for (const step of this.steps) this.before.push(this.before[this.before.length - 1] + step.fed);
    // token → the step that fed it
    this.stepOf = Uint16Array.from(this.steps.flatMap((step, n) => Array(step.fed).fill(n)));
    this.indexRows(run);
    this.indexAttention(run.seen);
  }

  get fed() {
    return this.before[this.steps.length];
  }

  indexRows(run) {
    // cache[layer][step][position] → number of the stored row
    let first = 0;
    // layer → its first row and the row after its last
    this.stored = run.rowCounts.map((n) => [first, (first += n)]);
    this.cache = run.cache.map((steps, layer) => {
      let next = this.stored[layer][0];
      let held = new Int32Array(0);
      return steps.map(([length, spans]) => {
        const now = new Int32Array(length);
        now.set(held.subarray(0, length));
        for (const [start, count] of spans) for (let i = 0; i < count; i++) now[start + i] = next++;
        return (held = now);
      });
    });
  }

  // looks[step][layer] → {S, at: [first weight of query t], counts: [keys kept of query t]}
  indexAttention(seen) {
    let offset = 0;
    this.looks = seen.map((layers) =>
      layers.map(([S, ...counts]) => ({
        S,
        counts,
        at: counts.map((n) => {
          const here = offset;
          offset += n * MODEL.heads;
          return here;
        }),
      })),
    );
  }

  length(step, layer) {
    return this.cache[layer][step].length;
  }

  // The last row is the newest token. Without a fault, row i is token i; rows left by a fault come
  // before token 0.
  token(step, layer, row) {
    return row - (this.length(step, layer) - this.before[step + 1]);
  }

  get widest() {
    return Math.max(...this.cache.flatMap((steps) => steps.map((rows) => rows.length)));
  }

  norm(step, layer, position, part, head) {
    // part 0 = key, 1 = value; head −1 = all heads together
    const row = this.cache[layer][step][position];
    return row === undefined ? undefined : this.normOf(row, part, head);
  }

  normOf(row, part, head) {
    const first = (row * 2 + part) * MODEL.kvHeads;
    if (head >= 0) return this.norms[first + head];
    let sum = 0;
    for (let h = 0; h < MODEL.kvHeads; h++) sum += this.norms[first + h] ** 2;
    return Math.sqrt(sum);
  }

  element(step, layer, position, part, head, dimension) {
    const row = this.cache[layer][step][position];
    if (row === undefined) return undefined;
    return this.rows[((row * 2 + part) * MODEL.kvHeads + head) * MODEL.headDim + dimension];
  }

  weight(step, layer, query, head, key) {
    // query: which of the tokens that this step fed
    const { S, at, counts } = this.looks[step][layer];
    if (key >= S || counts[query] === undefined) return undefined;
    const n = counts[query];
    return key < n ? this.attention[at[query] + head * n + key] : 0;
  }

  angle(fed, pair) {
    // [cos, sin] as the model used them
    const at = fed * (MODEL.headDim / 2) + pair;
    return [this.cos[at], this.sin[at]];
  }
}
