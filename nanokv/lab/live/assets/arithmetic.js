"use strict";
// The model's arithmetic. A tensor (T,N) is a Float32Array of T rows of N numbers; sums are
// computed in float64.

const work = { multiplyAdds: 0 }; // of all products so far; `linear` adds to it

function linear(x, weight, width) {
  // x (T,width), weight (N,width) → (T,N)
  const T = x.length / width;
  const N = weight.length / width;
  const y = new Float32Array(T * N);
  let t = 0;
  for (; t + 4 <= T; t += 4) fourRows(x, weight, y, t, width, N);
  for (; t < T; t++) oneRow(x, weight, y, t, width, N);
  work.multiplyAdds += T * N * width;
  return y;
}

function oneRow(x, weight, y, t, width, N) {
  // four rows of the weight at a time, which share one read of x
  const from = t * width;
  for (let n = 0; n < N; n += 4) {
    // every width of the model is a multiple of 4
    const w0 = n * width;
    const w1 = w0 + width;
    const w2 = w1 + width;
    const w3 = w2 + width;
    let a = 0;
    let b = 0;
    let c = 0;
    let d = 0;
    for (let i = 0; i < width; i++) {
      const value = x[from + i];
      a += value * weight[w0 + i];
      b += value * weight[w1 + i];
      c += value * weight[w2 + i];
      d += value * weight[w3 + i];
    }
    const o = t * N + n;
    y[o] = a;
    y[o + 1] = b;
    y[o + 2] = c;
    y[o + 3] = d;
  }
}

function fourRows(x, weight, y, t, width, N) {
  // four tokens share one read of a weight, which makes a prefill cheap per token
  const i0 = t * width;
  const i1 = i0 + width;
  const i2 = i1 + width;
  const i3 = i2 + width;
  for (let n = 0; n < N; n += 2) {
    const w0 = n * width;
    const w1 = w0 + width;
    let a = 0;
    let b = 0;
    let c = 0;
    let d = 0;
    let e = 0;
    let f = 0;
    let g = 0;
    let h = 0;
    for (let i = 0; i < width; i++) {
      const u = weight[w0 + i];
      const v = weight[w1 + i];
      const p = x[i0 + i];
      const q = x[i1 + i];
      const r = x[i2 + i];
      const s = x[i3 + i];
      a += p * u;
      b += q * u;
      c += r * u;
      d += s * u;
      e += p * v;
      f += q * v;
      g += r * v;
      h += s * v;
    }
    const o = t * N + n;
    const o1 = o + N;
    const o2 = o1 + N;
    const o3 = o2 + N;
    y[o] = a;
    y[o1] = b;
    y[o2] = c;
    y[o3] = d;
    y[o + 1] = e;
    y[o1 + 1] = f;
    y[o2 + 1] = g;
    y[o3 + 1] = h;
  }
}

function rmsNorm(x, weight, eps) {
  // scale every weight.length numbers to unit root mean square
  const N = weight.length;
  const y = new Float32Array(x.length);
  for (let from = 0; from < x.length; from += N) {
    let sum = 0;
    for (let i = 0; i < N; i++) sum += x[from + i] ** 2;
    const scale = 1 / Math.sqrt(sum / N + eps);
    for (let i = 0; i < N; i++) y[from + i] = x[from + i] * scale * weight[i];
  }
  return y;
}

function add(x, y) {
  // x + y, into x: the residual stream
  for (let i = 0; i < x.length; i++) x[i] += y[i];
  return x;
}

function silu(gate, up) {
  // silu(gate) · up
  const y = new Float32Array(gate.length);
  for (let i = 0; i < y.length; i++) y[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
  return y;
}

function rotated(x, position, D, theta) {
  // rotate heads of D numbers in place: dimension i with i + D/2
  const half = D / 2;
  for (let i = 0; i < half; i++) {
    const angle = Math.fround(
      position * Math.fround(1 / Math.fround(theta ** Math.fround((2 * i) / D))),
    );
    const cos = Math.cos(angle);
    const sin = Math.sin(angle);
    for (let from = i; from < x.length; from += D) {
      const a = x[from];
      const b = x[from + half];
      x[from] = a * cos - b * sin;
      x[from + half] = b * cos + a * sin;
    }
  }
}

function largest(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}
