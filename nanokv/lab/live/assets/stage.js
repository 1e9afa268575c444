"use strict";
// The picture of one step: q · cached keys → weights → weighted sum of the values. Each token is a
// column, which is painted once and then reused. Everything is drawn from the step's numbers.

const GUTTER = 46;
const ARCS = 40;
const WIDEST = 22;
const NARROW = 8.5; // pixels; in narrower columns only some tokens are named
const NAMED = 8; // how many are named then
// possible numbers of columns; the smallest that is enough is drawn
const ROOM = [32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512];

const inks = new Map(); // each colour is read once per theme, because reading a style is slow
const ink = (name) => inks.get(name) ?? inks.set(name, colour(name)).get(name);
const rgb = (name) =>
  ink(name)
    .match(/[0-9a-f]{2}/gi)
    .map((part) => parseInt(part, 16));
const blend = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));
const eased = (t) => (t <= 0 ? 0 : t >= 1 ? 1 : t * t * (3 - 2 * t));
// how far a movement that lasts from `from` to `to` has come at t: 0 … 1
const part = (t, from, to) => eased((t - from) / (to - from));

class Strip {
  // columns of D cells, one per token: painted once each
  constructor(name, D) {
    this.name = name;
    this.D = D;
    this.canvas = document.createElement("canvas");
    this.clear();
  }

  clear() {
    this.canvas.width = ROOM.at(-1);
    this.canvas.height = this.D;
    this.painted = 0;
    this.scale = 0;
  }

  paint(column, count) {
    // the columns that are new
    const context = this.canvas.getContext("2d");
    if (!this.scale)
      for (let s = 0; s < count; s++)
        for (const x of column(s)) this.scale = Math.max(this.scale, Math.abs(x));
    for (; this.painted < count; this.painted++) {
      context.putImageData(cells(column(this.painted), this.scale, this.name), this.painted, 0);
    }
  }
}

function cells(numbers, scale, name) {
  // a column of colours: the hue for numbers above 0, grey below
  const image = new ImageData(1, numbers.length);
  const none = rgb("--card");
  const plus = rgb(name);
  const minus = rgb("--minus-cell");
  numbers.forEach((x, i) => {
    const size = Math.min(1, Math.abs(x) / scale) ** 0.75;
    image.data.set([...blend(none, x > 0 ? plus : minus, size), 255], 4 * i);
  });
  return image;
}

class Stage {
  constructor(canvas, D) {
    this.canvas = canvas;
    this.D = D;
    this.keys = new Strip("--k", D);
    this.values = new Strip("--v", D);
    this.fit();
  }

  fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const sharp = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * sharp);
    this.canvas.height = Math.round(height * sharp);
    this.width = width;
    this.height = height;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(sharp, 0, 0, sharp, 0, 0);
  }

  repaint() {
    this.keys.clear();
    this.values.clear();
  } // another layer, head or theme

  keep(n) {
    for (const strip of [this.keys, this.values]) strip.painted = Math.min(n, strip.painted);
  }

  layout(count) {
    const room = ROOM.find((n) => n >= count) ?? count;
    const gutter = this.width < 500 ? 34 : GUTTER;
    const w = Math.min(WIDEST, (this.width - 2 * gutter) / room);
    const left = gutter;
    const names = this.height < 300 ? 46 : 54;
    const bars = this.height < 300 ? 40 : 50;
    const strip = (this.height - 2 * ARCS - names - bars) / 2;
    const keys = ARCS;
    return {
      room,
      w,
      left,
      strip,
      keys,
      names: keys + strip,
      bars: keys + strip + names,
      barHeight: bars,
      values: keys + strip + names + bars,
      right: left + w * room,
      x: (s) => left + w * s,
    };
  }

  // `look`: of Looks.at; `tokens`: [{text, soft}]; `fresh`: the first column that came with this
  // step; `t`: 0 … 1
  draw(look, tokens, fresh, t) {
    const c = this.context;
    const at = this.layout(tokens.length);
    c.clearRect(0, 0, this.width, this.height);
    this.frame(at);
    this.names(at, look, tokens);
    if (!look) return;
    this.keys.paint(look.key, tokens.length);
    this.values.paint(look.value, tokens.length);
    const met = part(t, 0.2, 0.6);
    const mixed = part(t, 0.6, 0.95);
    this.columns(at, look, tokens.length, fresh, part(t, 0, 0.25), mixed);
    this.arcs(at, look, met, mixed);
    this.bars(at, look, met);
    this.pillar(at.left - 26, at.keys, at.strip, look.q, 0, "--q");
    this.label("q", at.left - 19, at.keys + at.strip + 12, ink("--q"), "center", true);
    if (mixed > 0) {
      c.globalAlpha = mixed;
      this.pillar(at.right + 10, at.values, at.strip, look.mix, this.values.scale, "--v");
      this.label("mix", at.right + 17, at.values - 5, ink("--v"), "center", true);
      c.globalAlpha = 1;
    }
  }

  frame(at) {
    // room for columns that are to come
    const c = this.context;
    c.fillStyle = ink("--void");
    for (const y of [at.keys, at.values]) c.fillRect(at.left, y, at.w * at.room, at.strip);
    this.label("keys", at.right + 4, at.keys + 12, ink("--k"));
    this.label("values", 0, at.values + 12, ink("--v"));
    this.label("weights", 0, at.bars + at.barHeight - 4, ink("--soft"));
  }

  label(text, x, y, hue, align = "left", bold = false) {
    const c = this.context;
    c.font = `${bold ? "600 " : ""}${this.width < 500 ? 10 : 11}px system-ui, sans-serif`;
    c.fillStyle = hue;
    c.textAlign = align;
    c.fillText(text, x, y);
  }

  columns(at, look, all, fresh, come, mixed) {
    const c = this.context;
    const D = this.D;
    c.imageSmoothingEnabled = false;
    const show = (strip, y, from, to, shift) =>
      to > from &&
      c.drawImage(
        strip.canvas,
        from,
        0,
        to - from,
        D,
        at.x(from),
        y - shift,
        at.w * (to - from),
        at.strip,
      );
    for (const [strip, y] of [
      [this.keys, at.keys],
      [this.values, at.values],
    ]) {
      show(strip, y, 0, fresh, 0);
      c.globalAlpha = come;
      show(strip, y, fresh, all, (1 - come) * 18); // the new one drops into its place
      c.globalAlpha = 1;
    }
    c.fillStyle = ink("--card");
    for (let s = 0; s < all; s++) {
      // columns with little weight fade while values are summed; later columns are hidden
      const later = s >= look.count;
      c.globalAlpha = later ? 0.8 : 0.72 * mixed * (1 - Math.min(1, 3 * look.weights[s]));
      c.fillRect(at.x(s), at.values, at.w, at.strip);
      if (later) c.fillRect(at.x(s), at.keys, at.w, at.strip);
    }
    c.globalAlpha = 1;
    c.strokeStyle = ink("--card");
    c.lineWidth = at.w > 6 ? 1 : 0.5;
    c.beginPath();
    for (let s = 0; s <= all; s++) {
      for (const y of [at.keys, at.values]) {
        c.moveTo(at.x(s), y);
        c.lineTo(at.x(s), y + at.strip);
      }
    }
    c.stroke();
    c.strokeStyle = ink("--q");
    c.lineWidth = 1.5;
    for (const y of [at.keys, at.values]) c.strokeRect(at.x(look.count - 1), y, at.w, at.strip);
  }

  arcs(at, look, met, mixed) {
    // lines from q to the keys and from the values to the sum, as thick as the weight
    const c = this.context;
    const from = at.left - 19;
    const to = at.right + 17;
    const reached = met * look.count;
    for (let s = 0; s < look.count; s++) {
      const weight = look.weights[s];
      const x = at.x(s + 0.5);
      if (weight < 0.004 && s !== Math.floor(reached)) continue;
      if (s <= reached && met > 0) {
        this.arc(
          from,
          at.keys - 3,
          x,
          at.keys - 2,
          -1,
          ink("--q"),
          weight,
          s === Math.floor(reached) && met < 1,
        );
      }
      if (mixed > 0) {
        c.globalAlpha = mixed;
        this.arc(
          x,
          at.values + at.strip + 2,
          to,
          at.values + at.strip + 3,
          1,
          ink("--v"),
          weight,
          false,
        );
        c.globalAlpha = 1;
      }
    }
  }

  arc(x0, y0, x1, y1, way, hue, weight, asked) {
    const c = this.context;
    const high = Math.min(ARCS - 8, 10 + Math.abs(x1 - x0) / 8);
    const before = c.globalAlpha;
    c.strokeStyle = hue;
    c.lineWidth = asked ? 1 : 0.5 + 5 * weight;
    c.globalAlpha = before * (asked ? 0.9 : 0.25 + 0.65 * weight);
    c.beginPath();
    c.moveTo(x0, y0);
    c.bezierCurveTo(x0, y0 + way * high, x1, y1 + way * high, x1, y1);
    c.stroke();
    c.globalAlpha = before;
  }

  bars(at, look, met) {
    const c = this.context;
    const reached = met * look.count;
    const foot = at.values - 2;
    for (let s = 0; s < look.count; s++) {
      const grown = Math.min(1, Math.max(0, reached - s));
      const high = Math.max(0.7, look.weights[s] * (at.barHeight - 14));
      c.fillStyle = ink("--ink");
      c.fillRect(
        at.x(s) + Math.min(2, at.w / 4),
        foot - high * grown,
        at.w - Math.min(4, at.w / 2),
        high * grown,
      );
    }
    if (met === 1) {
      const s = look.strongest;
      const high = look.weights[s] * (at.barHeight - 14);
      this.label(
        percent(look.weights[s]),
        at.x(s + 0.5),
        foot - high - 3,
        ink("--ink"),
        "center",
        true,
      );
    }
  }

  names(at, look, tokens) {
    // name every token; if columns are too narrow, the newest and those with the highest weight
    const lit = look ? [look.count - 1, ...strongest(look.weights)] : [];
    const names = at.w < NARROW ? apart(lit, NARROW / at.w) : [...tokens.keys()];
    for (const s of names) {
      const { text, soft } = tokens[s];
      const bold = s === lit[0] || s === lit[1];
      const faint = soft || (look && s >= look.count);
      this.upright(text, at.x(s + 0.5) + 3, at.bars - 4, bold, faint);
    }
  }

  upright(text, x, y, bold, faint) {
    const c = this.context;
    c.save();
    c.translate(x, y);
    c.rotate(-Math.PI / 2);
    this.label(text, 0, 0, ink(bold ? "--ink" : faint ? "--minus-cell" : "--soft"), "left", bold);
    c.restore();
  }

  pillar(x, y, height, numbers, scale, hue) {
    // q or the weighted sum: a single column
    const c = this.context;
    const alone = (this.alone ??= document.createElement("canvas"));
    const image = cells(
      numbers,
      scale || numbers.reduce((most, x) => Math.max(most, Math.abs(x)), 0),
      hue,
    );
    alone.width = 1;
    alone.height = this.D;
    alone.getContext("2d").putImageData(image, 0, 0);
    c.imageSmoothingEnabled = false;
    c.drawImage(alone, x, y, 14, height);
    c.strokeStyle = ink(hue);
    c.lineWidth = 1.5;
    c.strokeRect(x, y, 14, height);
  }

  column(event, count) {
    // under the pointer
    const { left } = this.canvas.getBoundingClientRect();
    const at = this.layout(count);
    const s = Math.floor((event.clientX - left - at.left) / at.w);
    return s >= 0 && s < count ? s : -1;
  }
}

const percent = (weight) => `${(100 * weight).toFixed(weight < 0.1 ? 1 : 0)} %`;

function strongest(weights) {
  // the columns with the highest weights, in descending order
  const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]);
  return order.slice(0, NAMED).filter((s) => weights[s] > 0.03);
}

function apart(columns, least) {
  // the columns whose names do not overlap with those before them
  const chosen = [];
  for (const s of columns) if (chosen.every((t) => Math.abs(s - t) >= least)) chosen.push(s);
  return chosen;
}
