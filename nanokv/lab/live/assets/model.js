"use strict";
// The decoder-only transformer of nanokv/model.py, for one sequence. T tokens in a call · C hidden
// size · H query heads · Hk KV heads · D head dim · V vocabulary. The cache and the attention
// function are arguments.

class Model {
  constructor(config, tensors) {
    // config.json and {name: Float32Array}
    this.config = config;
    this.layers = Array.from(
      { length: config.num_hidden_layers },
      (_, i) => (name) => tensors[`model.layers.${i}.${name}.weight`],
    );
    this.embedding = tensors["model.embed_tokens.weight"]; // the head is its transpose
    this.norm = tensors["model.norm.weight"];
    this.shape = {
      heads: config.num_attention_heads,
      kvHeads: config.num_key_value_heads,
      headDim: config.head_dim,
      queryWidth: config.num_attention_heads * config.head_dim,
      keyWidth: config.num_key_value_heads * config.head_dim,
    };
  }

  forward(ids, cache, startPos, { attend, position }) {
    // T ids at startPos … startPos+T−1 → (T,C)
    if (startPos !== cache.length)
      throw new Error(`startPos is ${startPos}, the cache holds ${cache.length} tokens`);
    const positions = ids.map((_, t) => position(startPos, t));
    let x = this.embed(ids);
    this.layers.forEach((layer, i) => {
      x = this.block(layer, x, positions, cache.layers[i], attend);
    });
    return rmsNorm(x, this.norm, this.config.rms_norm_eps);
  }

  embed(ids) {
    const C = this.config.hidden_size;
    const x = new Float32Array(ids.length * C);
    ids.forEach((id, t) => x.set(this.embedding.subarray(id * C, (id + 1) * C), t * C));
    return x;
  }

  block(layer, x, positions, cache, attend) {
    // attention mixes positions, the MLP works on each alone
    const { rms_norm_eps: eps, hidden_size: C, intermediate_size: width } = this.config;
    let y = rmsNorm(x, layer("input_layernorm"), eps);
    x = add(x, this.attention(layer, y, positions, cache, attend));
    y = rmsNorm(x, layer("post_attention_layernorm"), eps);
    y = silu(linear(y, layer("mlp.gate_proj"), C), linear(y, layer("mlp.up_proj"), C));
    return add(x, linear(y, layer("mlp.down_proj"), width));
  }

  attention(layer, x, positions, cache, attend) {
    const C = this.config.hidden_size;
    const { queryWidth, keyWidth } = this.shape;
    // (T,H·D)
    const q = this.turned(layer, "q", linear(x, layer("self_attn.q_proj"), C), positions);
    // (T,Hk·D)
    const k = this.turned(layer, "k", linear(x, layer("self_attn.k_proj"), C), positions);
    const v = linear(x, layer("self_attn.v_proj"), C); // (T,Hk·D): neither normed nor rotated
    cache.append(k, v); // after the rotation, so a cached key is never rotated again
    return linear(attend(q, cache, this.shape), layer("self_attn.o_proj"), queryWidth);
  }

  turned(layer, name, x, positions) {
    // each head normed, then rotated to its position
    const { rms_norm_eps: eps, head_dim: D, rope_theta: theta } = this.config;
    const y = rmsNorm(x, layer(`self_attn.${name}_norm`), eps);
    const width = y.length / positions.length;
    positions.forEach((p, t) => rotated(y.subarray(t * width, (t + 1) * width), p, D, theta));
    return y;
  }

  logits(hidden) {
    // logits of the last row only, which predicts the next token
    const C = this.config.hidden_size;
    return linear(hidden.subarray(hidden.length - C), this.embedding, C);
  }
}

// How attention and positions are computed; experiments replace these.
const RIGHT = { attend, position: (start, t) => start + t };
