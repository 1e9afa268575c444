// The tab "Right − wrong" of a page with a fault: the positions that differ, one after the other,
// and how they differ.

const KINDS = ["key", "value", "attention"]; // attention: the weights of the position's query
const PLACES = (DATA.fault?.places ?? []).map(([step, layer, position, ...amounts]) => ({
  step,
  layer,
  position,
  amounts: amounts.map((x) => (x === null ? NaN : x)),
}));
// In the order of the computation.
const DIFFERENT = PLACES.filter(({ amounts }) => amounts.some((x) => x !== 0));
const MOST = KINDS.map((_, kind) =>
  Math.max(0, ...DIFFERENT.map(({ amounts }) => amounts[kind]).filter(Number.isFinite)),
);
const COMMON = Math.min(...RUNS.map((run) => run.steps.length)); // steps that both runs have
const commonStep = () => Math.min(view.step, COMMON - 1);
const other = { kind: 0, layer: 0, head: 0, position: 0 }; // what is chosen here

const differencePanel = {
  name: "Right − wrong",
  build(host) {
    this.fact = make("p", { className: "fact", role: "status" });
    this.first = make("button", { type: "button", textContent: "First difference" });
    this.back = make("button", { type: "button", textContent: "Previous" });
    this.next = make("button", { type: "button", textContent: "Next" });
    this.first.addEventListener("click", () => goToPlace(DIFFERENT[0]));
    this.back.addEventListener("click", () =>
      goToPlace(DIFFERENT.findLast((one) => order(one, here()) < 0)),
    );
    this.next.addEventListener("click", () =>
      goToPlace(DIFFERENT.find((one) => order(one, here()) > 0)),
    );
    const controls = make("div", { className: "controls" }, this.first, this.back, this.next);
    this.kind = choice(controls, "Show", ["keys", "values", "attention weights"], 0, (i) => {
      other.kind = i;
      const at = DIFFERENT.find((one) => order(one, here()) === 0);
      const differs = ({ amounts }) => amounts[i] !== 0;
      if (!at || !differs(at)) goToPlace(DIFFERENT.find(differs));
    });
    this.head = choice(controls, "Query head", span(MODEL.heads).map(String), 0, (i) => {
      other.head = i;
    });
    host.append(controls);
    this.map = new HeatMap(host, "How far each token is off, layer by layer", {
      grid: offGrid,
      table: offTable,
      moved: (r, c) => {
        other.layer = r;
        other.position = c;
        this.showPlace();
      },
    });
    host.append(this.fact);
    this.vector = new HeatMap(host, "One position: right − wrong", {
      grid: gapGrid,
      table: gapTable,
    });
    this.weights = new HeatMap(host, "Attention: right − wrong", {
      grid: weightGapGrid,
      table: weightGapTable,
    });
    this.logits = new Bars(host, "Logits: right − wrong", {
      bars: logitGapBars,
      table: logitGapTable,
    });
  },
  refresh() {
    this.kind.value = other.kind;
    this.head.value = other.head;
    if (DIFFERENT.length) this.map.cursor = [other.layer, other.position];
    this.map.refresh();
    this.logits.title.textContent =
      `Logits after step ${commonStep()}, right − wrong: ` +
      `the highest of both runs. ${logitsText()}`;
    this.logits.refresh();
    this.showPlace();
  },
  showPlace() {
    const at = DIFFERENT.findIndex((one) => order(one, here()) === 0);
    const none = !DIFFERENT.length;
    this.fact.textContent = none ? nothingDiffers() : `${stepFact(at)}${rowsPart()}${tokensPart()}`;
    for (const [button, off] of [
      [this.first, none],
      [this.back, none || at === 0],
      [this.next, at === DIFFERENT.length - 1],
    ]) {
      button.setAttribute("aria-disabled", String(off));
    }
    this.vector.title.textContent =
      `Layer ${DATA.layers[other.layer]}, ` +
      `${tokenAt(other.position)}: right − wrong in every dimension`;
    this.weights.title.textContent =
      `Attention of layer ${DATA.layers[other.layer]}, ` +
      `query head ${other.head}: right − wrong`;
    this.vector.refresh();
    this.weights.refresh();
  },
};

const here = () => ({ step: commonStep(), layer: other.layer, position: other.position });
const order = (a, b) => a.step - b.step || a.layer - b.layer || a.position - b.position;

function tokenAt(position) {
  const [right, wrong] = RUNS.map((run) => run.tokens[position]?.[1]);
  return (
    `position ${position} ${quoted(right ?? "")}` +
    (wrong === undefined || wrong === right ? "" : ` (wrong run: ${quoted(wrong)})`)
  );
}

function goToPlace(one) {
  if (!one) return; // there is no further one
  const kind = one.amounts.findIndex((x) => x !== 0);
  Object.assign(other, { layer: one.layer, position: one.position });
  if (one.amounts[other.kind] === 0) other.kind = kind;
  play(false);
  goTo(one.step);
  other.head = loudestHead(one); // its weights are known at its step, not before
  openTab(PANELS.indexOf(differencePanel));
  differencePanel.map.reveal(one.position);
}

// The query head whose weights differ most.
function loudestHead({ step, layer, position }) {
  if (RUNS[0].stepOf[position] !== step) return other.head;
  const off = span(MODEL.heads).map((head) =>
    Math.max(
      ...span(position + 1).map((key) => Math.abs(weightGap(layer, head, position, key) ?? 0)),
    ),
  );
  return off.indexOf(Math.max(...off));
}

// --- words ---------------------------------------------------------------------------------------

// For example "step 1, layer 0, position 12 “a”: key differs by 0.83, value by 0.1".
function placeText({ step, layer, position, amounts }) {
  const parts = KINDS.map((kind, i) => [kind, amounts[i]]).filter(([, x]) => x !== 0);
  const words = parts.map(([kind, x], i) =>
    Number.isNaN(x)
      ? `${kind} is not a number`
      : `${kind} ${i ? "" : "differs "}by ${figures(x, 2)}`,
  );
  return `step ${step}, layer ${DATA.layers[layer]}, ${tokenAt(position)}: ${words.join(", ")}`;
}

const firstOf = `First difference${DATA.layers.length < MODEL.layers ? " in the kept layers" : ""}`;
const firstText = () =>
  DIFFERENT.length ? `${firstOf}: ${placeText(DIFFERENT[0])}.` : nothingDiffers();

function stepFact(at) {
  if (at === 0)
    return (
      `${firstText()} It is difference 1 of ${count(DIFFERENT.length)}. ` +
      "Each amount is the largest |right − wrong| among the numbers of one vector."
    );
  if (at > 0)
    return (
      `Difference ${count(at + 1)} of ${count(DIFFERENT.length)}: ` + `${placeText(DIFFERENT[at])}.`
    );
  const n = DIFFERENT.filter(({ step }) => step === commonStep()).length;
  return n
    ? `Step ${commonStep()} has ${plural(n, "new difference")}; ` +
        `${tokenAt(other.position)} in layer ${DATA.layers[other.layer]} is not one of them.`
    : `Step ${commonStep()} has no new difference.`;
}

// Extra or missing rows, for example those of an earlier request.
function rowsPart() {
  const [right, wrong] = RUNS.map((run) => run.length(commonStep(), other.layer));
  return right === wrong
    ? ""
    : ` Attention reads ${plural(wrong, "row")} in the wrong run and ${count(right)} in the ` +
        "right one.";
}

// The step from which the runs also differ because they read other tokens.
function tokensPart() {
  const words = DATA.fault.wordsStep;
  const t = commonStep();
  if (view.step > t) return ` Only one of the two runs has step ${view.step}; this is step ${t}.`;
  if (words === null || t <= words) return "";
  return (
    ` Since step ${words} the runs have chosen other tokens, ` +
    `so from position ${RUNS[0].before[words + 1]} on they also differ because of what they read.`
  );
}

function nothingDiffers() {
  const { logitsStep, bytesStep, share, name } = DATA.fault;
  const kept = DATA.layers.length < MODEL.layers ? "kept " : "";
  const logits =
    logitsStep === null
      ? "The logits are equal too."
      : `The logits differ from step ${logitsStep} on.`;
  const sizes =
    bytesStep === null
      ? ""
      : ` The bytes differ: the cache has ${count(RUNS[1].steps[bytesStep].nbytes)} B instead ` +
        `of ${count(RUNS[0].steps[bytesStep].nbytes)} B.`;
  const end = RUNS[1].stopped ? ` The wrong run then breaks off: ${RUNS[1].stopped}` : "";
  return (
    `Nothing differs under ${name} in ${COMMON === 1 ? "the one step" : `all ${COMMON} steps`} ` +
    "that both runs have: every key, value and " +
    `attention weight of the ${kept}layers is equal, to ${figures(share, 1)} of the largest. ` +
    `${logits}${sizes}${end}`
  );
}

// --- maps ----------------------------------------------------------------------------------------

// [layer][position] → the three amounts after a step.
function amountsAt(step) {
  const table = DATA.layers.map(() => []);
  for (const one of PLACES) if (one.step <= step) table[one.layer][one.position] = one.amounts;
  return table;
}

const amount = (table, layer, position) => (table[layer][position] ?? [0, 0, 0])[other.kind];

function offGrid() {
  const run = RUNS[0];
  const t = commonStep();
  const table = amountsAt(t);
  const fed = run.before[t + 1];
  const kind = KINDS[other.kind];
  return {
    rows: DATA.layers.length,
    cols: run.before[COMMON],
    kind: "off",
    ends: ["0, equal", `${figures(MOST[other.kind], 3)}, most`],
    value: (r, c) => (c < fed ? amount(table, r, c) : undefined),
    range: () => [0, MOST[other.kind] || 1],
    rowName: (r) => `L${DATA.layers[r]}`,
    colName: String,
    colText: (c) => short(run.tokens[c][1]),
    mark: [0, DATA.layers.length - 1, run.before[t], fed - 1],
    describe: (r, c) =>
      `layer ${DATA.layers[r]}, ${tokenAt(c)}: ` +
      (c < fed ? amountText(kind, amount(table, r, c)) : "not in the cache yet"),
  };
}

const amountText = (kind, x) =>
  x === 0
    ? `${kind} equal`
    : Number.isNaN(x)
      ? `${kind} is not a number`
      : `${kind} differs by ${figures(x)}`;

function offTable() {
  const t = commonStep();
  const table = amountsAt(t);
  return {
    caption: `Largest |right − wrong| of each ${KINDS[other.kind]} after step ${t}`,
    head: ["position", "token", ...DATA.layers.map((l) => `layer ${l}`)],
    rows: span(RUNS[0].before[t + 1]).map((p) => [
      p,
      RUNS[0].tokens[p][1],
      ...DATA.layers.map((_, l) => figures(amount(table, l, p))),
    ]),
  };
}

// One number of the chosen position, after the chosen step.
function elementOf(run, part, head, dimension) {
  const t = commonStep();
  const row = other.position + run.length(t, other.layer) - run.before[t + 1];
  return run.element(t, other.layer, row, part, head, dimension);
}

const gap = (...at) => elementOf(RUNS[0], ...at) - elementOf(RUNS[1], ...at);

const sizeText = (x, part) => `${"KV"[part]} ${x > 1e-9 ? `by ${figures(x, 2)}` : "equal"}`;

function gapGrid() {
  const known = other.position < RUNS[0].before[commonStep() + 1];
  const grid = vectorMap(
    (...at) => (known ? gap(...at) : undefined),
    (size) => `brown: wrong larger, ${size.map(sizeText).join(", ")}`,
    () => "grey: equal · green: right larger, by as much",
  );
  return {
    ...grid,
    describe: (r, c) => {
      const [part, head] = [r < MODEL.kvHeads ? 0 : 1, r % MODEL.kvHeads];
      const [a, b] = RUNS.map((run) => elementOf(run, part, head, c));
      return (
        `${grid.rowName(r)}[${c}]: right ${figures(a)} − wrong ${figures(b)} = ` +
        `${figures(a - b)}`
      );
    },
  };
}

function gapTable() {
  const grid = gapGrid();
  return {
    caption:
      `Layer ${DATA.layers[other.layer]}, ${tokenAt(other.position)}, ` +
      `after step ${commonStep()}: right − wrong`,
    head: ["dimension", ...span(grid.rows).map(grid.rowName)],
    rows: span(grid.cols).map((c) => [c, ...span(grid.rows).map((r) => figures(grid.value(r, c)))]),
  };
}

// The weight that a query gave to a token's key at the query's step.
function weightOf(run, layer, head, query, token) {
  const t = run.stepOf[query];
  const row = token + run.looks[t][layer].S - run.before[t + 1];
  return run.weight(t, layer, query - run.before[t], head, row);
}

function weightGap(layer, head, query, token) {
  if (RUNS[0].stepOf[query] > commonStep()) return undefined;
  const [a, b] = RUNS.map((run) => weightOf(run, layer, head, query, token));
  // undefined: the mask hides the key in both runs.
  return token > query && !a && !b ? undefined : (a ?? 0) - (b ?? 0);
}

const signedRoot = (level) => 0.5 + Math.sign(level - 0.5) * Math.sqrt(Math.abs(level - 0.5) / 2);

function weightGapGrid() {
  const run = RUNS[0];
  const t = commonStep();
  const text = (p) => short(run.tokens[p][1]);
  return {
    rows: run.before[COMMON],
    cols: run.before[COMMON],
    kind: "two",
    widest: 24,
    height: lowRow,
    curve: signedRoot,
    ends: [
      "brown: wrong looks there more, −1",
      "+1, green: right looks there more (grey: equal; colour by the square root)",
    ],
    value: (r, c) => weightGap(other.layer, other.head, r, c),
    range: () => [-1, 1],
    rowName: (r) => `${text(r)} ${r}`,
    colName: String,
    colText: text,
    mark: [run.before[t], run.before[t + 1] - 1, 0, run.before[t + 1] - 1],
    describe: (r, c) => {
      const x = weightGap(other.layer, other.head, r, c);
      const where = `query ${tokenAt(r)}, key ${tokenAt(c)}`;
      if (x === undefined) return `${where}: not read`;
      const [a, b] = RUNS.map((one) =>
        figures(weightOf(one, other.layer, other.head, r, c) ?? 0, 3),
      );
      return `${where}: right ${a} − wrong ${b} = ${figures(x, 3)}`;
    },
  };
}

function weightGapTable() {
  const t = commonStep();
  const query = Math.min(other.position, RUNS[0].before[t + 1] - 1);
  const cells = [other.layer, other.head, query];
  return {
    caption:
      `Attention of layer ${DATA.layers[other.layer]}, query head ${other.head}, ` +
      `query ${tokenAt(query)}`,
    head: ["key", "token", "right", "wrong", "right − wrong"],
    rows: span(query + 1).map((key) => [
      key,
      RUNS[0].tokens[key][1],
      ...RUNS.map((run) => figures(weightOf(run, ...cells, key))),
      figures(weightGap(...cells, key)),
    ]),
  };
}

// --- logits --------------------------------------------------------------------------------------

const logitRows = () =>
  DATA.fault.logits[commonStep()].map(([id, piece, right, wrong]) => ({
    id,
    piece,
    right,
    wrong,
    gap: right === null || wrong === null ? NaN : right - wrong,
    chosen: RUNS.map((run) => run.steps[commonStep()].chosen === id),
  }));
const choosers = ({ chosen: [right, wrong] }) =>
  right && wrong ? "both" : right ? "right" : wrong ? "wrong" : "";

// A sentence about the logit that differs most.
function logitsText() {
  const known = logitRows().filter(({ gap }) => Number.isFinite(gap));
  const most = known.reduce((a, b) => (Math.abs(b.gap) > Math.abs(a.gap) ? b : a), { gap: 0 });
  return most.gap
    ? `The largest difference is that of ${quoted(most.piece)}: ${figures(most.gap, 3)}.`
    : "They are equal.";
}

function logitGapBars() {
  const rows = logitRows();
  return {
    signed: true,
    most: Math.max(...rows.map(({ gap }) => Math.abs(gap) || 0)),
    items: rows.map((row) => ({
      label: short(row.piece, 14),
      value: row.gap || 0,
      marked: Boolean(choosers(row)),
      text:
        `${figures(row.right, 3)} − ` +
        `${row.wrong < 0 ? `(${figures(row.wrong, 3)})` : figures(row.wrong, 3)} = ` +
        `${figures(row.gap, 3)}` +
        (choosers(row) && ` · chosen: ${choosers(row)}`),
    })),
  };
}

function logitGapTable() {
  return {
    caption: `Logits after step ${commonStep()}: the highest of both runs`,
    head: ["id", "token", "right", "wrong", "right − wrong", "chosen by"],
    rows: logitRows().map((row) => [
      row.id,
      row.piece,
      figures(row.right),
      figures(row.wrong),
      figures(row.gap),
      choosers(row),
    ]),
  };
}
