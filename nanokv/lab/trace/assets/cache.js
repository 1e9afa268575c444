// The tab "Cache": norms of keys and values per layer and position, one position in full, bytes.

const cachePanel = {
  name: "Cache",
  build(host) {
    const controls = make("div", { className: "controls" });
    const heads = ["all heads together", ...span(MODEL.kvHeads).map((h) => `head ${h}`)];
    this.head = choice(controls, "KV head", heads, 0, (i) => {
      view.kvHead = i - 1;
    });
    const own = make("input", { type: "checkbox" });
    own.addEventListener("change", () => {
      view.own = own.checked;
      refreshTab();
    });
    controls.append(make("label", {}, own, " each layer on its own scale"));
    this.fact = make("p", { className: "fact" });
    const meaning =
      "A column is a token, a row is a layer. Each cell shows how long a key or value vector " +
      "is (its norm): one " +
      `number instead of the vector's ${MODEL.kvHeads * MODEL.headDim} numbers. ` +
      "Choose a cell and all of them are drawn below.";
    const words = [controls, this.fact, make("p", { className: "meaning", textContent: meaning })];
    this.maps = ["Keys", "Values"].map(
      (noun, part) =>
        new HeatMap(host, `${noun}: the norm at each token, layer by layer`, {
          grid: () => normGrid(part),
          table: () => normTable(noun, part),
          moved: (r, c) => {
            view.layer = r;
            view.row = c;
            this.showVector();
          },
        }),
    );
    this.maps[0].element.after(...words); // the map first, directly under the slider
    this.vector = new HeatMap(host, "One position in full", {
      grid: vectorGrid,
      table: vectorTable,
    });
    this.bytes = new Lines(host, "Bytes of the whole cache after each step", {
      lines: byteLines,
      table: byteTable,
      picked: (i) => goTo(i),
    });
  },
  refresh() {
    this.fact.replaceChildren(...byteFact());
    [...this.maps, this.bytes].forEach((picture) => picture.refresh());
    this.showVector();
  },
  showVector() {
    this.vector.title.textContent =
      `Layer ${DATA.layers[view.layer]}, ` +
      `${rowPlace(view.layer, chosenRow())}: its key and its value`;
    this.vector.refresh();
  },
};

const expected = (n) => MODEL.bytesPerToken * now().before[n + 1];

function byteFact() {
  const measured = step().nbytes;
  const tokens = now().before[view.step + 1];
  const same = measured === expected(view.step);
  const read = now().length(view.step, 0);
  return [
    make("strong", { textContent: `${count(measured)} B measured` }),
    ` ${same ? "=" : "≠"} 2 (K and V) × ${MODEL.layers} layers × ${MODEL.kvHeads} KV heads × ` +
      `${MODEL.headDim} × ` +
      `${MODEL.itemsize} B × ${plural(tokens, "token")} = ${count(expected(view.step))} B. `,
    same
      ? `Each token adds ${count(MODEL.bytesPerToken)} B.`
      : make("em", { textContent: "The formula does not hold here." }),
    read === tokens ? "" : make("em", { textContent: ` Attention read ${plural(read, "row")}.` }),
  ];
}

// The range is that of all steps, so that a colour keeps its meaning while the slider moves.
function normRange(part, layer) {
  const key = `${part} ${view.kvHead} ${layer}`;
  const known = (now().ranges ??= {});
  if (known[key]) return known[key];
  let low = Infinity;
  let high = -Infinity;
  for (const [first, end] of layer === null ? now().stored : [now().stored[layer]]) {
    for (let row = first; row < end; row++) {
      const x = now().normOf(row, part, view.kvHead);
      if (!Number.isFinite(x)) continue;
      low = Math.min(low, x);
      high = Math.max(high, x);
    }
  }
  return (known[key] = low <= high ? [low, high] : [0, 1]);
}

function normGrid(part) {
  const run = now();
  const t = view.step;
  const length = Math.max(...DATA.layers.map((_, l) => run.length(t, l)));
  return {
    rows: DATA.layers.length,
    cols: run.widest,
    kind: "one",
    ...(view.own && { ends: ["least of the layer", "most"] }),
    value: (r, c) => run.norm(t, r, c, part, view.kvHead),
    range: (r) => normRange(part, view.own ? r : null),
    rowName: (r) => `L${DATA.layers[r]}`,
    colName: rowName,
    colText: rowText,
    mark: [0, DATA.layers.length - 1, Math.max(0, length - step().fed), Math.max(0, length - 1)],
    describe: (r, c) => {
      const x = run.norm(t, r, c, part, view.kvHead);
      return x === undefined
        ? `layer ${DATA.layers[r]}, row ${c}: not in the cache yet`
        : `layer ${DATA.layers[r]}, ${rowPlace(r, c)}: ${part ? "value" : "key"} norm ` +
            `${figures(x)}`;
    },
  };
}

function normTable(noun, part) {
  const run = now();
  const t = view.step;
  const held = Math.max(...DATA.layers.map((_, l) => run.length(t, l)));
  const heads = view.kvHead < 0 ? "all KV heads together" : `KV head ${view.kvHead}`;
  return {
    caption: `${noun}, norms after step ${t}, ${heads}`,
    head: ["row", "token", ...DATA.layers.map((l) => `layer ${l}`)],
    rows: span(held).map((p) => [
      p,
      rowPiece(0, p),
      ...DATA.layers.map((_, l) => figures(run.norm(t, l, p, part, view.kvHead))),
    ]),
  };
}

function chosenRow() {
  const last = now().length(view.step, view.layer) - 1;
  return Math.min(view.row ?? last, last);
}

function vectorGrid() {
  const row = chosenRow();
  return vectorMap(
    (part, head, dimension) => now().element(view.step, view.layer, row, part, head, dimension),
    (size) => size.map((x, part) => `${"KV"[part]} −${figures(x, 3)}`).join(", "),
    (size) => size.map((x, part) => `${"KV"[part]} ${figures(x, 3)}`).join(", "),
  );
}

// One position: a row for each KV head; keys and values have different scales.
function vectorMap(element, low, high) {
  const heads = MODEL.kvHeads;
  const part = (r) => (r < heads ? 0 : 1);
  const name = (r) => `${"KV"[part(r)]}${r % heads}`;
  const at = (r, c) => element(part(r), r % heads, c);
  const size = [0, 1].map((part) =>
    Math.max(
      1e-9,
      ...span(heads * MODEL.headDim).map((i) => {
        const x = element(part, Math.floor(i / MODEL.headDim), i % MODEL.headDim);
        return Number.isFinite(x) ? Math.abs(x) : 0;
      }),
    ),
  );
  return {
    rows: 2 * heads,
    cols: MODEL.headDim,
    kind: "two",
    value: at,
    ends: [low(size), high(size)],
    range: (r) => [-size[part(r)], size[part(r)]],
    rowName: name,
    colName: (c) => String(c),
    describe: (r, c) =>
      `${name(r)}[${c}] = ${figures(at(r, c))} (${part(r) ? "value" : "key"}, ` +
      `KV head ${r % heads}, dimension ${c})`,
  };
}

function vectorTable() {
  const grid = vectorGrid();
  return {
    caption:
      `Layer ${DATA.layers[view.layer]}, ${rowPlace(view.layer, chosenRow())}, ` +
      `after step ${view.step}`,
    head: ["dimension", ...span(grid.rows).map(grid.rowName)],
    rows: span(grid.cols).map((c) => [c, ...span(grid.rows).map((r) => figures(grid.value(r, c)))]),
  };
}

function byteLines() {
  return {
    series: [
      { name: "measured nbytes", values: now().steps.map((one) => one.nbytes) },
      { name: "formula", values: now().steps.map((_, i) => expected(i)) },
    ],
    unit: bytes,
    at: view.step,
    describe: (i) =>
      `step ${i}: ${count(now().steps[i].nbytes)} B measured, ` +
      `${count(expected(i))} B by the formula`,
  };
}

function byteTable() {
  return {
    caption: "Bytes of the cache after each step, all layers",
    head: ["step", "tokens fed so far", "measured nbytes", "formula"],
    rows: now().steps.map((one, i) => [
      i,
      now().before[i + 1],
      count(one.nbytes),
      count(expected(i)),
    ]),
  };
}
