"use strict";
// A record of attention: the query of every token in every layer. Keys and values need no copy,
// because they stay unchanged in the cache, so earlier weights can be computed again from them.

class Looks {
  constructor(model) {
    this.model = model;
    this.queries = model.layers.map(() => []);
  }

  get how() {
    // like RIGHT, and records each query
    let layer = 0;
    const keep = (q) => {
      const W = this.model.shape.queryWidth;
      const kept = this.queries[layer++ % this.queries.length];
      for (let from = 0; from < q.length; from += W) kept.push(q.slice(from, from + W));
    };
    return { ...RIGHT, attend: (q, cache, shape) => (keep(q), attend(q, cache, shape)) };
  }

  keep(n) {
    for (const kept of this.queries) kept.length = Math.min(n, kept.length);
  }

  at(position, layer, head, cache) {
    // for the token at this position: its query, the visible keys, and the weighted sum of values
    const { shape } = this.model;
    const { headDim: D, heads, kvHeads, keyWidth } = shape;
    const q = this.queries[layer][position];
    const { keys, values } = cache.layers[layer];
    const count = position + 1;
    const found = scores(q, 0, head, keys, count, shape);
    const taken = softmax(found.slice());
    const y = new Float32Array(q.length);
    mix(y, taken, values, 0, head, shape);
    const own = (row) => row.subarray(head * D, (head + 1) * D);
    const first = Math.floor(head / (heads / kvHeads)) * D;
    const column = (rows, s) => rows.subarray(s * keyWidth + first, s * keyWidth + first + D);
    return {
      position,
      count,
      scores: found,
      weights: taken,
      q: own(q),
      mix: own(y),
      key: (s) => column(keys, s),
      value: (s) => column(values, s),
      strongest: largest(taken),
    };
  }
}
