"use strict";
// The work of each step: one row per step, one cell per token. With the cache, a step fills the
// cells of its new tokens and reads the others. Without it, a step fills all cells, in the order
// of their computation.

class Triangles {
  constructor(canvas) {
    this.canvas = canvas;
    this.fit();
  }

  fit() {
    Stage.prototype.fit.call(this);
  }

  // steps: [{tokens, fresh, again}]: tokens so far, new tokens of this step, and cells that the
  // side without a cache has computed
  draw(steps) {
    const c = this.context;
    const half = (this.width - 16) / 2;
    const top = 16;
    c.clearRect(0, 0, this.width, this.height);
    this.title("with cache", 0, ink("--done"));
    this.title("without", half + 16, ink("--again"));
    if (!steps.length) return;
    const across = Math.max(24, steps.at(-1).tokens);
    const down = Math.max(8, steps.length);
    const w = half / across;
    const h = Math.min(12, (this.height - top) / down);
    steps.forEach(({ tokens, fresh, again }, row) => {
      const y = top + row * h;
      const high = Math.max(0.5, h - (h > 3 ? 1 : 0));
      this.cells(0, y, w, high, tokens - fresh, tokens, "--done", 0);
      this.cells(half + 16, y, w, high, 0, again, "--again", tokens);
    });
  }

  cells(x, y, w, h, from, to, hue, all) {
    const c = this.context;
    c.fillStyle = ink("--void");
    c.fillRect(x, y, w * Math.max(to, all), h);
    c.fillStyle = ink(hue);
    c.fillRect(x + w * from, y, Math.max(w * (to - from), to > from ? 1 : 0), h);
  }

  title(text, x, hue) {
    this.context.font = "11px system-ui, sans-serif";
    this.context.fillStyle = hue;
    this.context.textAlign = "left";
    this.context.fillText(text, x, 10);
  }
}
