"use strict";
// Attention over cached keys and values: softmax(q kᵀ / √D) v.
// An attention function is attend(q, layer, shape): q (T,H·D) attends to `layer`, the cache of one
// layer. layer.seen(t) gives the keys and values that query t may see.

function attend(q, layer, shape) {
  const y = new Float32Array(q.length);
  const T = q.length / shape.queryWidth;
  for (let t = 0; t < T; t++) {
    const { keys, values, count } = layer.seen(t);
    for (let h = 0; h < shape.heads; h++) {
      mix(y, weights(q, t, h, keys, count, shape), values, t, h, shape);
    }
  }
  return y;
}

function scores(q, t, h, keys, count, { heads, kvHeads, headDim: D, queryWidth, keyWidth }) {
  // q · k / √D for each key
  const found = new Float64Array(count);
  const from = t * queryWidth + h * D;
  const scale = 1 / Math.sqrt(D);
  const head = Math.floor(h / (heads / kvHeads)) * D; // query heads share a KV head
  for (let s = 0; s < count; s++) {
    let sum = 0;
    for (let i = 0, k = s * keyWidth + head; i < D; i++, k++) sum += q[from + i] * keys[k];
    found[s] = sum * scale;
  }
  work.multiplyAdds += count * D;
  return found;
}

function softmax(found) {
  let most = -Infinity;
  let sum = 0;
  for (const score of found) most = Math.max(most, score);
  for (let s = 0; s < found.length; s++) sum += found[s] = Math.exp(found[s] - most);
  for (let s = 0; s < found.length; s++) found[s] /= sum;
  return found;
}

// the weights of query t in head h
const weights = (...asked) => softmax(scores(...asked));

function mix(y, taken, values, t, h, { heads, kvHeads, headDim: D, queryWidth, keyWidth }) {
  // Σ weight · value
  const to = t * queryWidth + h * D;
  const head = Math.floor(h / (heads / kvHeads)) * D;
  for (let s = 0; s < taken.length; s++) {
    for (let i = 0, v = s * keyWidth + head; i < D; i++, v++) y[to + i] += taken[s] * values[v];
  }
  work.multiplyAdds += taken.length * D;
}

// A bug, for an experiment: the scores are multiplied by the mask. A masked score becomes 0, and
// e⁰ is 1, so later tokens stay visible. A single query has no later tokens, so the bug affects
// only prompts.
function attendMultiplied(q, layer, shape) {
  const y = new Float32Array(q.length);
  const T = q.length / shape.queryWidth;
  const { keys, values, count } = layer.seen(T - 1);
  for (let t = 0; t < T; t++) {
    const visible = layer.seen(t).count;
    for (let h = 0; h < shape.heads; h++) {
      const found = scores(q, t, h, keys, count, shape).fill(0, visible);
      mix(y, softmax(found), values, t, h, shape);
    }
  }
  return y;
}
