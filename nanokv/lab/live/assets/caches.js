"use strict";
// The caches. A layer's cache keeps a key and a value (Hk·D numbers each) per token:
//   append(k, v)  adds T rows, keys already rotated
//   seen(t)       {keys, values, count}: what query t of those T may see, oldest first
//   truncate(n)   removes positions ≥ n
//   length        tokens so far, the next call's only legal startPos
// A cache has one of these per layer. Each kind behaves like the cache of the same name in
// nanokv/cache.

class Cache {
  constructor(layers) {
    this.layers = layers;
  }
  get length() {
    return this.layers[0].length;
  }
  get nbytes() {
    return this.layers.reduce((sum, layer) => sum + layer.nbytes, 0);
  }
  truncate(n) {
    for (const layer of this.layers) layer.truncate(n);
  }
}

class GrowingLayer {
  // rows in the order of their positions; the capacity doubles whenever it is full
  constructor(width) {
    this.width = width;
    this.length = 0;
    this.new = 0;
    this.keys = new Float32Array(0);
    this.values = new Float32Array(0);
  }

  append(k, v) {
    const held = this.length * this.width;
    if (held + k.length > this.keys.length) {
      const room = Math.max(64 * this.width, 2 * (held + k.length));
      this.keys = enlarged(this.keys, room);
      this.values = enlarged(this.values, room);
    }
    this.keys.set(k, held);
    this.values.set(v, held);
    this.new = k.length / this.width;
    this.length += this.new;
  }

  seen(t) {
    // itself and all before it: the causal mask
    return { keys: this.keys, values: this.values, count: this.length - this.new + t + 1 };
  }

  truncate(n) {
    this.length = Math.min(n, this.length);
  }
  get nbytes() {
    return 2 * 4 * this.length * this.width;
  } // of the rows in use
}

function enlarged(old, size) {
  const grown = new Float32Array(size);
  grown.set(old);
  return grown;
}

function joined(...parts) {
  const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (all.set(part, at), at + part.length), 0);
  return all;
}

// Keeps the last `window` positions and the first `sinks`. The sinks are rotated again at each
// step, so that attention sees them right before the window.
class SlidingLayer {
  constructor(width, window, sinks, turn) {
    Object.assign(this, { width, window, sinks, turn, length: 0, new: 0, dropped: 0 });
    this.keys = new Float32Array(0);
    this.values = new Float32Array(0); // what is held
  }

  append(k, v) {
    this.allKeys = joined(this.keys, k);
    this.allValues = joined(this.values, v); // what the new queries may see
    this.allDropped = this.dropped;
    this.new = k.length / this.width;
    this.length += this.new;
    const rows = this.allKeys.length / this.width;
    const sinks = Math.min(this.sinks, this.length);
    const keep = Math.min(this.window - 1, Math.max(0, rows - this.sinks));
    const held = (x) => joined(this.rows(x, 0, sinks), this.rows(x, rows - keep, rows));
    this.keys = held(this.allKeys);
    this.values = held(this.allValues);
    this.dropped = this.length - sinks - keep;
  }

  rows(x, from, to) {
    return x.subarray(from * this.width, to * this.width);
  }

  seen(t) {
    const position = this.length - this.new + t;
    const sinks = Math.min(this.sinks, position + 1);
    const first = Math.max(sinks, position - this.window + 1);
    const part = (x) => this.rows(x, first - this.allDropped, position + 1 - this.allDropped);
    const moved = this.rows(this.allKeys, 0, sinks).slice();
    const evicted = Math.max(0, position - (this.window - 1) - this.sinks);
    if (evicted) this.turn(moved, evicted);
    return {
      keys: joined(moved, part(this.allKeys)),
      values: joined(this.rows(this.allValues, 0, sinks), part(this.allValues)),
      count: sinks + position + 1 - first,
    };
  }

  truncate(n) {
    // positions that have left the window cannot be restored
    if (n && n < this.length && this.dropped)
      throw new Error(`${this.dropped} tokens have left the window`);
    if (n >= this.length) return;
    this.keys = this.rows(this.keys, 0, n).slice();
    this.values = this.rows(this.values, 0, n).slice();
    this.length = n;
    this.dropped = 0;
  }

  get nbytes() {
    return 4 * (this.keys.length + this.values.length);
  }
}

// KIVI: each channel of a block of `group` keys, and each value, in a few bits; the newest tokens
// stay exact.
class QuantizedLayer {
  constructor(width, headDim, kBits, vBits, group, residual) {
    Object.assign(this, { width, headDim, kBits, vBits, group, residual, new: 0 });
    this.truncate(0);
  }

  get length() {
    return this.quantized + this.exactKeys.length / this.width;
  }

  append(k, v) {
    const due = Math.max(
      0,
      Math.floor((this.length - this.quantized - this.residual) / this.group),
    );
    if (due) this.flush(due);
    this.exactKeys = joined(this.exactKeys, k);
    this.exactValues = joined(this.exactValues, v);
    this.keys = joined(this.roundedKeys, this.exactKeys);
    this.values = joined(this.roundedValues, this.exactValues);
    this.new = k.length / this.width;
  }

  flush(blocks) {
    // quantize the oldest groups of exact tokens; each is quantized only once
    const end = blocks * this.group * this.width;
    const k = this.exactKeys.slice(0, end);
    const v = this.exactValues.slice(0, end);
    const W = this.width;
    for (let block = 0; block < end; block += this.group * W) {
      // a channel of a block
      for (let c = 0; c < W; c++) roundToBits(k, block + c, this.group, W, this.kBits);
    }
    for (let from = 0; from < end; from += this.headDim)
      roundToBits(v, from, this.headDim, 1, this.vBits); // a token
    this.roundedKeys = joined(this.roundedKeys, k);
    this.roundedValues = joined(this.roundedValues, v);
    this.exactKeys = this.exactKeys.slice(end);
    this.exactValues = this.exactValues.slice(end);
  }

  get quantized() {
    return this.roundedKeys.length / this.width;
  }

  seen(t) {
    return { keys: this.keys, values: this.values, count: this.length - this.new + t + 1 };
  }

  truncate(n) {
    if (n && n < this.length) throw new Error("this page only empties a quantized cache");
    if (n) return;
    this.roundedKeys = this.roundedValues = this.exactKeys = this.exactValues = new Float32Array(0);
  }

  get nbytes() {
    // codes, fp16 scales and lows, and the exact rows
    const q = this.quantized;
    const heads = this.width / this.headDim;
    const codes = (q * this.width * (this.kBits + this.vBits)) / 8;
    const scales = 2 * 2 * ((q / this.group) * this.width + q * heads);
    return codes + scales + 4 * (this.exactKeys.length + this.exactValues.length);
  }
}

// `count` numbers of x, `stride` apart, in place: codes of `bits` bits, a scale and a low, as
// nanokv/cache/codes.py does.
function roundToBits(x, from, count, stride, bits) {
  const F = Math.fround;
  const steps = 2 ** bits - 1;
  const ULP = 2 ** -10;
  const TINY = 2 ** -24;
  let low = Infinity;
  let high = -Infinity;
  for (let i = 0; i < count; i++) {
    const value = x[from + i * stride];
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  low = toHalf(F(F(low - F(Math.abs(low) * ULP)) - TINY));
  const scale = toHalf(F(F(F(F(high - low) / steps) * F(1 + ULP)) + TINY));
  for (let i = 0; i < count; i++) {
    const at = from + i * stride;
    const code = toEven(F(F(x[at] - low) / scale));
    x[at] = F(F(Math.min(steps, Math.max(0, code)) * scale) + low);
  }
}

function toEven(x) {
  // to the nearest integer, halves to the even one
  const below = Math.floor(x);
  const part = x - below;
  return part > 0.5 || (part === 0.5 && below % 2) ? below + 1 : below;
}

function toHalf(x) {
  // to the nearest fp16
  if (x === 0) return 0;
  const exponent = Math.max(-14, Math.floor(Math.log2(Math.abs(x))));
  const step = 2 ** (exponent - 10);
  return toEven(x / step) * step;
}

// Pages of `page` tokens, taken from a pool one by one. The table maps tokens to pages.
class PagePool {
  constructor(page, width, layers) {
    Object.assign(this, { page, width, layers, taken: 0 });
    this.keys = [];
    this.values = []; // [page][layer] → (page,width)
  }

  take() {
    const empty = () =>
      Array.from({ length: this.layers }, () => new Float32Array(this.page * this.width));
    this.keys.push(empty());
    this.values.push(empty());
    return this.taken++;
  }
}

class PagedLayer {
  constructor(pool, table, layer) {
    Object.assign(this, { pool, table, layer, length: 0, new: 0 });
  }

  append(k, v) {
    const { page, width } = this.pool;
    const i = this.layer;
    this.new = k.length / width;
    for (let t = 0; t < this.new; t++, this.length++) {
      if (this.length === this.table.length * page) this.table.push(this.pool.take());
      const number = this.table[Math.floor(this.length / page)];
      const slot = (this.length % page) * width;
      this.pool.keys[number][i].set(k.subarray(t * width, (t + 1) * width), slot);
      this.pool.values[number][i].set(v.subarray(t * width, (t + 1) * width), slot);
    }
    this.keys = this.gathered(this.pool.keys);
    this.values = this.gathered(this.pool.values);
  }

  gathered(pages) {
    return joined(...this.table.map((number) => pages[number][this.layer]));
  }

  seen(t) {
    return { keys: this.keys, values: this.values, count: this.length - this.new + t + 1 };
  }

  truncate(n) {
    this.length = Math.min(n, this.length);
  } // its pages stay in the table, for the next tokens

  get nbytes() {
    return 2 * 4 * this.table.length * this.pool.page * this.pool.width;
  } // includes the empty slots
}

// A bug, for an experiment: a new chat begins at position 0, but the rows of the previous chat are
// still visible.
class NotClearedLayer extends GrowingLayer {
  constructor(width, before) {
    super(width);
    const used = (x) => x.slice(0, before.length * width);
    this.stale = before.length;
    this.staleKeys = used(before.keys);
    this.staleValues = used(before.values);
  }

  append(k, v) {
    super.append(k, v);
    this.shownKeys = joined(this.staleKeys, this.keys);
    this.shownValues = joined(this.staleValues, this.values);
  }

  seen(t) {
    return {
      keys: this.shownKeys,
      values: this.shownValues,
      count: this.stale + super.seen(t).count,
    };
  }
}

function makeCache(kind, model) {
  // "dict", "sliding:window=64:sinks=4", … as nanokv.make_cache reads it
  const [name, ...rest] = kind.split(":");
  const { keyWidth: width, headDim } = model.shape;
  const given = Object.fromEntries(
    rest.map((part) => part.split("=")).map(([key, text]) => [key, Number(text)]),
  );
  const turn = (keys, by) => rotated(keys, by, headDim, model.config.rope_theta);
  const {
    window,
    sinks = 0,
    bits = 8,
    k_bits = bits,
    v_bits = bits,
    group = 32,
    residual = 32,
    page = 16,
  } = given;
  const pool = new PagePool(page, width, model.layers.length);
  const table = [];
  const KINDS = {
    dict: () => new GrowingLayer(width),
    sliding: () => new SlidingLayer(width, window, sinks, turn),
    quantized: () => new QuantizedLayer(width, headDim, k_bits, v_bits, group, residual),
    paged: (_, i) => new PagedLayer(pool, table, i),
  };
  return new Cache(model.layers.map(KINDS[name]));
}

const notCleared = (before, model) =>
  new Cache(before.layers.map((layer) => new NotClearedLayer(model.shape.keyWidth, layer)));
