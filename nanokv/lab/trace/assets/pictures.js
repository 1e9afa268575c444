// Pictures: a heat map with keyboard navigation, a line chart, bars.

// --- heat map ------------------------------------------------------------------------------------

const rgb = (name) =>
  colour(name)
    .match(/[\da-f]{2}/gi)
    .map((hex) => parseInt(hex, 16));
const STOPS = {
  one: ["--low", "--half", "--high"],
  two: ["--minus", "--middle", "--plus"],
  off: ["--middle", "--half", "--high"],
};

// 256 colours of the theme. "one": from the least to the most. "two": from minus through 0 to plus.
// "off": from 0 to the most.
function palette(kind) {
  const stops = STOPS[kind].map(rgb);
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * 2;
    const k = Math.min(1, Math.floor(at));
    return stops[k].map((from, c) => Math.round(from + (stops[k + 1][c] - from) * (at - k)));
  });
}

class HeatMap extends Figure {
  // `grid()` gives {rows, cols, value(r, c), range(r), kind, rowName(r), colName(c),
  //   describe(r, c): the text for a cell,
  //   mark: [first row, last row, first column, last column] of the new cells,
  //   colText?(c): the token above a column, ends?: words under the scale,
  //   curve?(0…1), widest?, height?(cell)}.
  // An undefined value is a cell that does not exist (yet); NaN is not a number.
  constructor(host, title, { grid, table, moved = () => {} }) {
    super(host, title, table);
    this.grid = grid;
    this.moved = moved;
    this.cursor = null;
    // These names do not scroll with the map.
    this.names = make("canvas", { className: "names", "aria-hidden": "true" });
    this.canvas = make("canvas", {
      className: "map",
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "heat map",
    });
    this.canvas.setAttribute("aria-label", `${title}. Arrow keys move from cell to cell.`);
    this.scale = make("p", { className: "scale", "aria-hidden": "true" });
    this.port = make("div", { className: "scroll" }, this.names, this.canvas);
    this.body.append(this.port, this.scale);
    this.readout.textContent = "Point at a cell, or focus the map and use the arrow keys.";
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    for (const kind of ["pointermove", "pointerdown"])
      this.canvas.addEventListener(kind, (event) => this.point(event));
    this.canvas.addEventListener("focus", () => this.move(...(this.cursor ?? this.start())));
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  start() {
    // where the keyboard begins: the newest cell
    const [top, , , right] = this.grid().mark ?? [0, 0, 0, 0];
    return [top, right];
  }

  key(event) {
    const { rows, cols } = this.grid();
    const [r, c] = this.cursor ?? this.start();
    const to = {
      ArrowLeft: [r, c - 1],
      ArrowRight: [r, c + 1],
      ArrowUp: [r - 1, c],
      ArrowDown: [r + 1, c],
      Home: [r, 0],
      End: [r, cols - 1],
      PageUp: [0, c],
      PageDown: [rows - 1, c],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    this.move(Math.min(rows - 1, Math.max(0, to[0])), Math.min(cols - 1, Math.max(0, to[1])));
    this.reveal(this.cursor[1]);
  }

  point(event) {
    const { rows, cols } = this.grid();
    const { left, top, cell, height } = this.layout;
    const c = Math.floor((event.offsetX - left) / cell);
    const r = Math.floor((event.offsetY - top) / height);
    if (r >= 0 && r < rows && c >= 0 && c < cols) this.move(r, c);
  }

  move(r, c) {
    if (this.cursor && this.cursor[0] === r && this.cursor[1] === c) return;
    this.cursor = [r, c];
    this.readout.textContent = this.grid().describe(r, c);
    this.moved(r, c);
    this.draw();
  }

  reveal(c) {
    // scroll a column into the box
    if (!this.layout) return;
    const { left, cell } = this.layout;
    const room = this.port.clientWidth - this.names.offsetWidth;
    const x = left + c * cell;
    if (x - 2 * cell < this.port.scrollLeft) this.port.scrollLeft = x - 2 * cell;
    else if (x + 3 * cell > this.port.scrollLeft + room) this.port.scrollLeft = x + 3 * cell - room;
  }

  refresh() {
    // after a step: the same cursor, new numbers
    const { rows, cols, describe, mark } = this.grid();
    if (this.cursor && (this.cursor[0] >= rows || this.cursor[1] >= cols)) this.cursor = null;
    if (this.cursor) this.readout.textContent = describe(...this.cursor);
    this.fill();
    this.draw();
    if (mark && mark[3] !== this.newest) this.reveal((this.newest = mark[3]));
  }

  draw() {
    const room = this.body.clientWidth;
    if (!room) return; // in a hidden tab
    const grid = this.grid();
    const { rows, cols, colText } = grid;
    const pen = this.canvas.getContext("2d");
    pen.font = LETTERS;
    const names = 9 + Math.max(...span(rows).map((r) => widthOf(pen, grid.rowName(r))));
    const left = 1;
    const texts = colText ? 20 + Math.max(...span(cols).map((c) => widthOf(pen, colText(c)))) : 2;
    // For tokens, columns are as wide as letters are high, unless there are too many columns.
    const least = cols > 200 ? (colText ? 4 : 2) : colText ? 15 : 3.5;
    const cell = Math.max(least, Math.min(grid.widest ?? 34, (room - names - 8) / cols));
    const height = grid.height ? grid.height(cell) : Math.max(12, Math.min(24, cell * 1.6));
    this.layout = { left, top: texts, cell, height };
    const tall = texts + height * rows + (colText ? 2 : 20);
    (sized(this.names, names, tall), sized(this.canvas, left + cell * cols + 2, tall));
    this.paintCells(pen, grid);
    this.paintColumns(pen, grid);
    this.paintRows(this.names.getContext("2d"), grid, names);
    this.paintScale(grid);
  }

  paintCells(pen, { rows, cols, value, range, kind, mark, curve = (x) => x }) {
    const { left, top, cell, height } = this.layout;
    const gap = cell >= 6 && height >= 6 ? 1 : 0;
    const colours = palette(kind);
    const empty = rgb("--empty");
    const broken = rgb("--broken");
    // One pixel per cell, then enlarged: fast also for 512 × 512 cells.
    const small = new ImageData(cols, rows);
    for (let r = 0, i = 0; r < rows; r++) {
      const [low, high] = range(r);
      const span = high - low || 1;
      for (let c = 0; c < cols; c++, i += 4) {
        const x = value(r, c);
        const level = curve(Math.max(0, Math.min(1, (x - low) / span)));
        small.data.set(
          x === undefined ? empty : Number.isNaN(x) ? broken : colours[Math.round(255 * level)],
          i,
        );
        small.data[i + 3] = 255;
      }
    }
    const hidden = new OffscreenCanvas(cols, rows);
    hidden.getContext("2d").putImageData(small, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(hidden, left, top, cols * cell, rows * height);
    if (gap) {
      pen.fillStyle = colour("--card");
      for (let r = 1; r <= rows; r++) pen.fillRect(left, top + r * height - 1, cols * cell, 1);
      for (let c = 1; c <= cols; c++) pen.fillRect(left + c * cell - 1, top, 1, rows * height);
    }
    const frame = (r0, r1, c0, c1, name, line) => {
      pen.lineWidth = line;
      pen.strokeStyle = colour(name);
      pen.strokeRect(
        left + c0 * cell - 0.5,
        top + r0 * height - 0.5,
        (c1 - c0 + 1) * cell,
        (r1 - r0 + 1) * height,
      );
    };
    if (mark) frame(...mark, "--mark", 1.5);
    for (const [name, line] of [
      ["--card", 5],
      ["--ink", 2],
    ]) {
      // seen on light and on dark cells
      if (this.cursor)
        frame(this.cursor[0], this.cursor[0], this.cursor[1], this.cursor[1], name, line);
    }
  }

  // Column numbers are below the map; if there are tokens, both are above it.
  paintColumns(pen, { rows, cols, colName, colText }) {
    const { left, top, cell, height } = this.layout;
    const middle = (c) => left + (c + 0.5) * cell;
    const steps = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128];
    const wide = (colText ? 1 : 9) + 7 * colName(cols - 1).length;
    const apart = (least) => steps.find((n) => n * cell >= least) ?? 256;
    const soft = colour("--soft");
    const ink = colour("--ink");
    const every = apart(wide);
    const chosen = this.cursor?.[1];
    pen.font = LETTERS;
    pen.textAlign = "center";
    pen.textBaseline = colText ? "bottom" : "top";
    for (let c = 0; c < cols; c += every) {
      pen.fillStyle = c === chosen ? ink : soft;
      pen.fillText(colName(c), middle(c), colText ? top - 2 : top + rows * height + 5);
    }
    if (!colText) return;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.rotate(-Math.PI / 2); // upwards: (x, y) of the page is (−y, x) here
    for (let c = 0, each = apart(12); c < cols; c += each) {
      pen.fillStyle = c === chosen ? ink : soft;
      pen.fillText(colText(c), 16 - top, middle(c));
    }
    pen.rotate(Math.PI / 2);
  }

  paintRows(pen, { rows, rowName }, right) {
    const { top, height } = this.layout;
    const every = Math.ceil(12 / height);
    const soft = colour("--soft");
    const ink = colour("--ink");
    pen.font = LETTERS;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let r = 0; r < rows; r += every) {
      pen.fillStyle = r === this.cursor?.[0] ? ink : soft;
      pen.fillText(rowName(r), right - 5, top + (r + 0.5) * height);
    }
  }

  paintScale({ range, kind, ends = range(0).map((x) => figures(x, 3)) }) {
    this.scale.replaceChildren(ends[0], make("span", { className: `ramp ${kind}` }), ends[1]);
  }
}

const WIDTHS = new Map();

function widthOf(pen, text) {
  // The same few labels are measured at every step.
  if (!WIDTHS.has(text)) WIDTHS.set(text, pen.measureText(text).width);
  return WIDTHS.get(text);
}

// --- lines and bars ------------------------------------------------------------------------------

// `lines()` gives {series: [{name, values, dashed}], unit(x), describe(i), at}
class Lines extends Figure {
  constructor(host, title, { lines, table, picked }) {
    super(host, title, table);
    this.lines = lines;
    this.picked = picked;
    this.key = make("p", { className: "key", "aria-hidden": "true" });
    this.svg = shape("svg", { "aria-hidden": "true", class: "lines" });
    this.body.append(this.key, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.say(this.index(event)));
    this.svg.addEventListener("pointerleave", () => this.say(this.lines().at));
    this.svg.addEventListener("click", (event) => this.picked(this.index(event)));
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  index(event) {
    const { left, step, last } = this.layout;
    return Math.max(0, Math.min(last, Math.round((event.offsetX - left) / step)));
  }

  say(i) {
    this.readout.textContent = this.lines().describe(i);
  }

  refresh() {
    this.say(this.lines().at);
    this.fill();
    this.draw();
  }

  draw() {
    const room = this.body.clientWidth;
    if (!room) return;
    const { series, unit, at } = this.lines();
    const last = series[0].values.length - 1;
    const most = Math.max(...series.flatMap((one) => one.values)) || 1;
    const left = 10 + 7 * Math.max(...[0, most / 2, most].map((v) => unit(v).length));
    const tall = 170;
    const floor = tall - 22;
    const top = 10;
    const step = (room - left - 10) / Math.max(1, last);
    this.layout = { left, step, last };
    const x = (i) => left + i * step;
    const y = (v) => floor - ((floor - top) * v) / most;
    this.svg.setAttribute("viewBox", `0 0 ${room} ${tall}`);
    (this.svg.setAttribute("width", room), this.svg.setAttribute("height", tall));
    const parts = [0, 0.5, 1].flatMap((part) => [
      shape("line", {
        class: "rule",
        x1: left,
        x2: room - 10,
        y1: y(part * most),
        y2: y(part * most),
      }),
      shape(
        "text",
        { x: left - 6, y: y(part * most) + 4, "text-anchor": "end" },
        unit(part * most),
      ),
    ]);
    const every = Math.ceil((last + 1) / Math.max(2, Math.floor(room / 60)));
    for (let i = 0; i <= last; i += every)
      parts.push(shape("text", { x: x(i), y: tall - 4, "text-anchor": "middle" }, i));
    parts.push(shape("line", { class: "now", x1: x(at), x2: x(at), y1: top, y2: floor }));
    series.forEach(({ values }, n) => {
      parts.push(
        shape("polyline", {
          class: `line line-${n}`,
          points: values.map((v, i) => `${x(i)},${y(v)}`).join(" "),
        }),
      );
      parts.push(shape("circle", { class: `dot dot-${n}`, cx: x(at), cy: y(values[at]), r: 4 }));
    });
    this.svg.replaceChildren(...parts);
    this.key.replaceChildren(
      ...series.map(({ name }, n) => make("span", { className: `key-${n}`, textContent: name })),
    );
  }
}

// `bars()` gives {most, signed, items: [{label, value, text, marked}]}; signed: 0 in the middle
class Bars extends Figure {
  constructor(host, title, { bars, table }) {
    super(host, title, table);
    this.bars = bars;
    this.list = make("ol", { className: "bars" });
    this.body.append(this.list);
    this.readout.remove();
  }

  refresh() {
    const { most, items, signed } = this.bars();
    this.list.classList.toggle("of-two", Boolean(signed));
    this.list.replaceChildren(
      ...items.map(({ label, value, text, marked }) => {
        const bar = make("span", { className: "fill" });
        const part = Math.min(1, Math.abs(value) / (most || 1)) * (signed ? 50 : 100);
        bar.style.width = `${part}%`;
        if (signed) bar.style.marginLeft = `${value < 0 ? 50 - part : 50}%`;
        if (signed) bar.classList.add(value < 0 ? "minus" : "plus");
        return make(
          "li",
          { className: marked ? "chosen" : "" },
          make("span", { className: "name", textContent: label }),
          make("span", { className: signed ? "rail signed" : "rail" }, bar),
          make("span", { className: "amount", textContent: text }),
        );
      }),
    );
    this.fill();
  }
}
