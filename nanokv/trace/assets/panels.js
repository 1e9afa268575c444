// The five tabs. Each has build(host), once, and refresh(), after every step or choice; `view` is what is chosen.

const RUNS = DATA.runs.map((run) => new Recording(run));
const view = { run: 0, step: 0, layer: 0, head: 0, kvHead: -1, own: false, query: null, row: null, position: null, pair: 0 };
const now = () => RUNS[view.run];
const step = () => now().steps[view.step];
const newest = () => now().before[view.step + 1] - 1; // the last token that went in
const place = (fed) => `position ${fed} ${quoted(now().tokens[fed]?.[1] ?? "")}`;
const rowToken = (layer, row) => now().token(view.step, layer, row);
const rowName = (row) => (rowToken(0, row) < 0 ? "old" : String(rowToken(0, row))); // under the column of a map
const rowPiece = (layer, row) => (rowToken(layer, row) < 0 ? "left from before" : now().tokens[rowToken(layer, row)][1]);
const rowPlace = (layer, row) => (rowToken(layer, row) < 0 ? `row ${row}, left from before` : place(rowToken(layer, row)));
const span = (n) => Array.from({ length: n }, (_, i) => i);

function choice(host, text, options, chosen, changed) {
  const select = make("select", {}, ...options.map((name, i) => make("option", { value: i, textContent: name })));
  select.value = chosen;
  select.addEventListener("change", () => { changed(Number(select.value)); refreshTab(); });
  host.append(make("label", {}, `${text} `, select));
  return select;
}

// --- cache ----------------------------------------------------------------------------------------------------------

const cachePanel = {
  name: "Cache",
  build(host) {
    const controls = make("div", { className: "controls" });
    const heads = ["all heads together", ...span(MODEL.kvHeads).map((h) => `head ${h}`)];
    choice(controls, "KV head", heads, 0, (i) => { view.kvHead = i - 1; });
    const own = make("input", { type: "checkbox" });
    own.addEventListener("change", () => { view.own = own.checked; refreshTab(); });
    controls.append(make("label", {}, own, " each layer on its own scale"));
    this.fact = make("p", { className: "fact" });
    host.append(this.fact, controls);
    this.maps = ["Keys", "Values"].map((noun, part) => new HeatMap(host, `${noun}: the norm of what each position holds`, {
      grid: () => normGrid(part),
      table: () => normTable(noun, part),
      moved: (r, c) => { view.layer = r; view.row = c; this.showVector(); },
    }));
    this.vector = new HeatMap(host, "One position in full", { grid: vectorGrid, table: vectorTable });
    this.bytes = new Lines(host, "Bytes of the whole cache after each step", {
      lines: byteLines, table: byteTable, picked: (i) => goTo(i),
    });
  },
  refresh() {
    this.fact.replaceChildren(...byteFact());
    [...this.maps, this.bytes].forEach((picture) => picture.refresh());
    this.showVector();
  },
  showVector() {
    this.vector.title.textContent = `Layer ${DATA.layers[view.layer]}, ${rowPlace(view.layer, chosenRow())}: its key and its value`;
    this.vector.refresh();
  },
};

const expected = (n) => MODEL.bytesPerToken * now().before[n + 1];

function byteFact() {
  const measured = step().nbytes, tokens = now().before[view.step + 1], same = measured === expected(view.step);
  const read = now().length(view.step, 0);
  return [
    make("strong", { textContent: `${count(measured)} B measured` }),
    ` ${same ? "=" : "≠"} 2 (K and V) × ${MODEL.layers} layers × ${MODEL.kvHeads} KV heads × ${MODEL.headDim} × ` +
    `${MODEL.itemsize} B × ${plural(tokens, "token")} = ${count(expected(view.step))} B. `,
    same ? `Each token adds ${count(MODEL.bytesPerToken)} B.` : make("em", { textContent: "The formula does not hold here." }),
    read === tokens ? "" : make("em", { textContent: ` Attention read ${plural(read, "row")}.` }),
  ];
}

function normRange(part, layer) { // the same at every step, so that a colour keeps its meaning while the slider moves
  const key = `${part} ${view.kvHead} ${layer}`, known = (now().ranges ??= {});
  if (known[key]) return known[key];
  let low = Infinity, high = -Infinity;
  for (const [first, end] of layer === null ? now().stored : [now().stored[layer]]) {
    for (let row = first; row < end; row++) {
      const x = now().normOf(row, part, view.kvHead);
      if (Number.isFinite(x)) low = Math.min(low, x), high = Math.max(high, x);
    }
  }
  return (known[key] = low <= high ? [low, high] : [0, 1]);
}

function normGrid(part) {
  const run = now(), t = view.step, length = Math.max(...DATA.layers.map((_, l) => run.length(t, l)));
  return {
    rows: DATA.layers.length, cols: run.widest, kind: "one",
    ...(view.own && { ends: ["least of the layer", "most"] }),
    value: (r, c) => run.norm(t, r, c, part, view.kvHead),
    range: (r) => normRange(part, view.own ? r : null),
    rowName: (r) => `L${DATA.layers[r]}`, colName: rowName,
    mark: [0, DATA.layers.length - 1, Math.max(0, length - step().fed), Math.max(0, length - 1)],
    describe: (r, c) => {
      const x = run.norm(t, r, c, part, view.kvHead);
      return x === undefined ? `layer ${DATA.layers[r]}, row ${c}: not in the cache yet`
        : `layer ${DATA.layers[r]}, ${rowPlace(r, c)}: ${part ? "value" : "key"} norm ${figures(x)}`;
    },
  };
}

function normTable(noun, part) {
  const run = now(), t = view.step, held = Math.max(...DATA.layers.map((_, l) => run.length(t, l)));
  const heads = view.kvHead < 0 ? "all KV heads together" : `KV head ${view.kvHead}`;
  return {
    caption: `${noun}, norms after step ${t}, ${heads}`,
    head: ["row", "token", ...DATA.layers.map((l) => `layer ${l}`)],
    rows: span(held).map((p) => [p, rowPiece(0, p),
      ...DATA.layers.map((_, l) => figures(run.norm(t, l, p, part, view.kvHead)))]),
  };
}

function chosenRow() {
  const last = now().length(view.step, view.layer) - 1;
  return Math.min(view.row ?? last, last);
}

function vectorGrid() {
  const heads = MODEL.kvHeads, row = chosenRow();
  const at = (r, c) => now().element(view.step, view.layer, row, Math.floor(r / heads), r % heads, c);
  const size = [0, 1].map((part) => Math.max(1e-9, ...span(heads * MODEL.headDim).map((i) => {
    const x = at(part * heads + Math.floor(i / MODEL.headDim), i % MODEL.headDim);
    return Number.isFinite(x) ? Math.abs(x) : 0;
  })));
  const part = (r) => (r < heads ? 0 : 1), name = (r) => `${"KV"[part(r)]}${r % heads}`;
  return {
    rows: 2 * heads, cols: MODEL.headDim, kind: "two", value: at,
    ends: [`K −${figures(size[0], 3)}, V −${figures(size[1], 3)}`, `K ${figures(size[0], 3)}, V ${figures(size[1], 3)}`],
    range: (r) => [-size[part(r)], size[part(r)]],
    rowName: name, colName: (c) => String(c),
    describe: (r, c) => `${name(r)}[${c}] = ${figures(at(r, c))} (${part(r) ? "value" : "key"}, KV head ${r % heads}, dimension ${c})`,
  };
}

function vectorTable() {
  const grid = vectorGrid();
  return {
    caption: `Layer ${DATA.layers[view.layer]}, ${rowPlace(view.layer, chosenRow())}, after step ${view.step}`,
    head: ["dimension", ...span(grid.rows).map(grid.rowName)],
    rows: span(grid.cols).map((c) => [c, ...span(grid.rows).map((r) => figures(grid.value(r, c)))]),
  };
}

function byteLines() {
  return {
    series: [{ name: "measured nbytes", values: now().steps.map((one) => one.nbytes) },
      { name: "formula", values: now().steps.map((_, i) => expected(i)) }],
    unit: bytes, at: view.step,
    describe: (i) => `step ${i}: ${count(now().steps[i].nbytes)} B measured, ${count(expected(i))} B by the formula`,
  };
}

function byteTable() {
  return {
    caption: "Bytes of the cache after each step, all layers",
    head: ["step", "tokens fed so far", "measured nbytes", "formula"],
    rows: now().steps.map((one, i) => [i, now().before[i + 1], count(one.nbytes), count(expected(i))]),
  };
}

// --- attention ------------------------------------------------------------------------------------------------------

const attentionPanel = {
  name: "Attention",
  build(host) {
    const controls = make("div", { className: "controls" });
    this.layer = choice(controls, "Layer", DATA.layers.map(String), 0, (i) => { view.layer = i; });
    choice(controls, "Query head", span(MODEL.heads).map(String), 0, (i) => { view.head = i; });
    this.query = make("input", { type: "number", min: 0 });
    this.query.addEventListener("change", () => { view.query = this.query.value === "" ? null : Number(this.query.value); refreshTab(); });
    const follow = make("button", { type: "button", textContent: "newest" });
    follow.addEventListener("click", () => { view.query = null; refreshTab(); });
    controls.append(make("label", {}, "Query position ", this.query), follow);
    this.fact = make("p", { className: "fact" });
    host.append(this.fact, controls);
    this.map = new HeatMap(host, "Who looks where: a row for each query, a column for each key", {
      grid: attentionGrid, table: attentionTable,
      moved: (r) => { view.query = r === newest() ? null : r; this.follow(); },
    });
    this.bars = new Bars(host, "Most weight", { bars: weightBars, table: weightTable });
  },
  follow() {
    this.query.max = newest();
    this.query.value = chosenQuery();
    this.layer.value = view.layer;
    this.bars.title.textContent = `Where ${place(chosenQuery())} looks: the keys with most weight`;
    this.bars.refresh();
  },
  refresh() {
    const G = MODEL.heads / MODEL.kvHeads, error = now().steps[view.step].error;
    const group = `Query head ${view.head} reads KV head ${Math.floor(view.head / G)}`;
    this.fact.textContent = `${group}: ${G} query heads share each. ` + (step().fed > 1
      ? `This step is a block of ${step().fed} queries.` : "This step is one query, a single row.") +
      ` Weights × values give the output of the kernel, to ${figures(error, 2)}.`;
    this.map.refresh();
    this.follow();
  },
};

const chosenQuery = () => Math.max(0, Math.min(view.query ?? newest(), newest()));

function look(query, key) { // weight that a query gave to a row of the cache when it was fed, at this step or before
  const t = now().stepOf[query];
  return t > view.step ? undefined : now().weight(t, view.layer, query - now().before[t], view.head, key);
}

function keyPiece(query, key) { // a row that was read by a query: the token whose key it is
  const token = now().token(now().stepOf[query], view.layer, key);
  return token < 0 ? "left from before" : now().tokens[token]?.[1] ?? "";
}

function attentionGrid() {
  const run = now(), first = run.before[view.step], last = newest(), keys = run.looks[view.step][view.layer].S;
  return {
    rows: run.fed, cols: run.widest, kind: "one", widest: 24, height: (cell) => Math.min(cell, 14), curve: Math.sqrt,
    ends: ["weight 0", "1, colour by its square root"],
    value: (r, c) => {
      const x = look(r, c);
      return x === 0 && run.token(run.stepOf[r], view.layer, c) > r ? undefined : x; // hidden by the causal mask
    },
    range: () => [0, 1],
    rowName: (r) => String(r), colName: rowName, mark: [first, last, 0, Math.max(0, keys - 1)],
    describe: (r, c) => {
      const x = look(r, c), query = `query ${place(r)}`;
      return x === undefined ? `${query}: row ${c} was not read` : `${query}, key ${c} ${quoted(keyPiece(r, c))}: weight ${figures(x)}`;
    },
  };
}

function attentionTable() {
  const first = now().before[view.step], last = newest(), from = Math.max(first, last - 63);
  const keys = now().looks[view.step][view.layer].S;
  return {
    caption: `Attention of layer ${DATA.layers[view.layer]}, query head ${view.head}, step ${view.step}: ` +
      `queries ${from} to ${last}, a column each`,
    head: ["key", "token", ...span(last - from + 1).map((i) => `query ${from + i}`)],
    rows: span(keys).map((key) => [key, keyPiece(last, key),
      ...span(last - from + 1).map((i) => figures(look(from + i, key)))]),
  };
}

function weights() { // [key, weight] of the chosen query, most first
  const query = chosenQuery(), keys = now().looks[now().stepOf[query]][view.layer].S;
  return span(keys).map((key) => [key, look(query, key)]).filter(([, x]) => x > 0).sort((a, b) => b[1] - a[1]);
}

function weightBars() {
  return {
    most: 1,
    items: weights().slice(0, 10).map(([key, x]) => ({
      label: `${key} ${spaced(keyPiece(chosenQuery(), key))}`, value: x, text: figures(x, 3), marked: false,
    })),
  };
}

function weightTable() {
  return {
    caption: `Weights of query ${place(chosenQuery())}, layer ${DATA.layers[view.layer]}, query head ${view.head}, ` +
      "most first; keys that are not listed have weight 0",
    head: ["key", "token", "weight"],
    rows: weights().map(([key, x]) => [key, keyPiece(chosenQuery(), key), figures(x)]),
  };
}

// --- positions ------------------------------------------------------------------------------------------------------

const PAIRS = MODEL.headDim / 2;
const chosenPosition = () => Math.min(view.position ?? newest(), newest());

const positionPanel = {
  name: "Positions",
  build(host) {
    this.fact = make("p", { className: "fact" });
    host.append(this.fact);
    this.dials = new Figure(host, "Angles of one position", dialTable);
    this.hands = make("div", { className: "dials", role: "img" });
    this.dials.body.append(this.hands);
    this.dials.readout.remove();
    this.map = new HeatMap(host, "cos of the angle: a row for each pair of dimensions, a column for each position", {
      grid: angleGrid, table: angleTable, moved: (r, c) => { view.position = c; view.pair = r; this.draw(); },
    });
  },
  draw() {
    const fed = chosenPosition();
    this.dials.title.textContent = `Angles of ${place(fed)}: pair i turns by its own speed each position`;
    this.hands.setAttribute("aria-label", `${PAIRS} dials; the table has their numbers`);
    this.hands.replaceChildren(...span(PAIRS).map((pair) => dial(pair, ...now().angle(fed, pair))));
    this.dials.fill();
  },
  refresh() {
    const { start, fed, positions } = step(), range = (a, n) => (n > 1 ? `${a} … ${a + n - 1}` : `${a}`);
    const right = positions.every((p, i) => p === now().before[view.step] + i);
    this.fact.textContent = `The model was called with start_pos ${start} for ${plural(fed, "token")}; ` +
      `the angles it used are those of position ${range(positions[0], fed)}. ` +
      (right ? "They are the tokens' own positions." : `The tokens stand at ${range(now().before[view.step], fed)}: these angles are wrong.`) +
      ` Dimensions i and i + ${PAIRS} form pair i and turn by θ^(−2i/${MODEL.headDim}) radians per position, θ = ${count(MODEL.ropeTheta)}.`;
    this.draw();
    this.map.refresh();
  },
};

function dial(pair, cos, sin) {
  const svg = shape("svg", { viewBox: "-12 -12 24 24", class: pair === view.pair ? "dial chosen" : "dial" },
    shape("title", {}, `pair ${pair}: ${figures(Math.atan2(sin, cos))} rad`),
    shape("circle", { r: 10 }), shape("line", { x1: 0, y1: 0, x2: 9 * cos, y2: -9 * sin }));
  return make("div", {}, svg, make("span", { textContent: pair }));
}

function angleGrid() {
  const last = newest(), first = now().before[view.step];
  return {
    rows: PAIRS, cols: now().fed, kind: "two", height: () => 12,
    value: (r, c) => (c > last ? undefined : now().angle(c, r)[0]), range: () => [-1, 1],
    rowName: (r) => String(r), colName: (c) => String(c), mark: [0, PAIRS - 1, first, last],
    describe: (r, c) => c > last ? `pair ${r}, ${place(c)}: not computed yet`
      : `pair ${r}, ${place(c)}: cos ${figures(now().angle(c, r)[0])}, sin ${figures(now().angle(c, r)[1])}`,
  };
}

function angleTable() {
  return {
    caption: `cos of the angles up to step ${view.step}`,
    head: ["position", "token", ...span(PAIRS).map((pair) => `pair ${pair}`)],
    rows: span(newest() + 1).map((p) => [p, now().tokens[p][1], ...span(PAIRS).map((pair) => figures(now().angle(p, pair)[0], 3))]),
  };
}

function dialTable() {
  const fed = chosenPosition();
  return {
    caption: `Angles of ${place(fed)}`,
    head: ["pair", "dimensions", "radians per position", "cos", "sin", "angle in radians"],
    rows: span(PAIRS).map((pair) => {
      const [cos, sin] = now().angle(fed, pair);
      return [pair, `${pair}, ${pair + PAIRS}`, figures(MODEL.ropeSpeeds[pair]), figures(cos), figures(sin), figures(Math.atan2(sin, cos))];
    }),
  };
}

// --- logits ---------------------------------------------------------------------------------------------------------

const logitPanel = {
  name: "Logits",
  build(host) {
    this.fact = make("p", { className: "fact" });
    host.append(this.fact);
    this.bars = new Bars(host, "", { bars: logitBars, table: logitTable });
  },
  refresh() {
    const run = now(), n = run.before[view.step + 1];
    this.fact.textContent = `After ${plural(n, "token")} the highest logit decides, temperature 0: ` +
      `${quoted(run.tokens[n][1])} (id ${run.tokens[n][0]}) becomes token ${n}.` + faultFact();
    this.bars.title.textContent = `Top ${step().top.length} of ${count(MODEL.vocabulary)}: probability at temperature 1, and the logit`;
    this.bars.refresh();
  },
};

function faultFact() {
  const delta = DATA.fault?.deltas[view.step];
  if (!DATA.fault || delta === undefined) return "";
  return ` Right and faulted run differ by max |Δ logit| ${figures(delta, 3)} at this step.`;
}

const percent = (p) => (p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);

const topRows = () => step().top.map(([id, piece], i) => {
  const at = view.step * step().top.length + i;
  return { id, piece, logit: now().logits[at], probability: now().probabilities[at] };
});

function logitBars() {
  return {
    most: 1,
    items: topRows().map(({ id, piece, logit, probability }) => ({
      label: spaced(piece), value: probability, marked: id === step().chosen,
      text: `${percent(probability)}  ·  ${figures(logit)}`,
    })),
  };
}

function logitTable() {
  return {
    caption: `Top ${step().top.length} logits after step ${view.step}`,
    head: ["rank", "id", "token", "logit", "probability", "chosen"],
    rows: topRows().map(({ id, piece, logit, probability }, i) =>
      [i + 1, id, piece, figures(logit), figures(probability), id === step().chosen ? "yes" : ""]),
  };
}

// --- cost -----------------------------------------------------------------------------------------------------------

const sum = (list, until) => list.slice(0, until + 1).reduce((a, b) => a + b, 0);
const milli = (x) => `${figures(x, 3)} ms`;

const costPanel = {
  name: "Cost",
  build(host) {
    const { repeat, uncached, difference } = DATA.costs;
    const both = uncached.length ? ` Without a cache nanokv.score runs the whole text again at every step; its logits differ by at most ${figures(difference, 2)}.` : " The run without a cache was not measured.";
    host.append(make("p", { className: "fact", textContent:
      `Times are medians of ${plural(repeat, "run")} of the run as it should be, on this machine, with nothing recording (${DATA.machine}).${both}` }));
    this.cards = make("div", { className: "cards" });
    host.append(this.cards);
    this.times = new Lines(host, "Milliseconds of each step", { lines: timeLines, table: timeTable, picked: (i) => goTo(i) });
    this.work = new Lines(host, "Tokens through the model, so far", { lines: workLines, table: workTable, picked: (i) => goTo(i) });
  },
  refresh() {
    const at = costStep(), { cached, uncached } = DATA.costs, read = MODEL.weightBytes + RUNS[0].steps[at].nbytes;
    const card = (title, ...lines) => make("div", { className: "card" }, make("h3", { textContent: title }),
      make("dl", {}, ...lines.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })])));
    this.cards.replaceChildren(card("With the cache", ["tokens through the model", `${plural(fedAt(at), "token")}, ${count(RUNS[0].before[at + 1])} so far`],
      ["time", `${milli(cached[at])}, ${milli(sum(cached, at))} so far`],
      ["bytes read at least", `${bytes(MODEL.weightBytes)} weights + ${bytes(RUNS[0].steps[at].nbytes)} cache = ${bytes(read)}`]),
    ...(uncached.length ? [card("Without a cache", ["tokens through the model", `${plural(again(at), "token")}, ${count(sum(span(at + 1).map(again), at))} so far`],
      ["time", `${milli(uncached[at])}, ${milli(sum(uncached, at))} so far`],
      ["bytes read at least", `${bytes(MODEL.weightBytes)} weights`])] : []));
    this.times.refresh();
    this.work.refresh();
  },
};

const costStep = () => Math.min(view.step, DATA.costs.cached.length - 1);
const fedAt = (i) => RUNS[0].steps[i].fed;
const again = (i) => RUNS[0].before[i + 1]; // what recomputing step i feeds: everything

function pairOf(cached, uncached, unit) {
  const series = [{ name: "with the cache", values: cached }];
  if (DATA.costs.uncached.length) series.push({ name: "without", values: uncached });
  return {
    series, unit, at: costStep(),
    describe: (i) => `step ${i}: ${series.map(({ name, values }) => `${unit(values[i])} ${name}`).join(", ")}`,
  };
}

const timeLines = () => pairOf(DATA.costs.cached, DATA.costs.uncached, (x) => milli(x));
const workLines = () => {
  const steps = span(DATA.costs.cached.length);
  return pairOf(steps.map((i) => RUNS[0].before[i + 1]), steps.map((i) => sum(steps.map(again), i)), (x) => count(Math.round(x)));
};

function costTable(caption, { series, unit }) {
  return { caption, head: ["step", ...series.map(({ name }) => name)],
    rows: series[0].values.map((_, i) => [i, ...series.map(({ values }) => unit(values[i]))]) };
}
const timeTable = () => costTable("Milliseconds of each step", timeLines());
const workTable = () => costTable("Tokens through the model up to each step", workLines());

const PANELS = [cachePanel, attentionPanel, positionPanel, logitPanel, costPanel];
