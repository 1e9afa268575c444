// The tab "Attention": the attention weights as a map, and the keys with the highest weight.

const attentionPanel = {
  name: "Attention",
  build(host) {
    const controls = make("div", { className: "controls" });
    this.layer = choice(controls, "Layer", DATA.layers.map(String), 0, (i) => {
      view.layer = i;
    });
    this.head = choice(controls, "Query head", span(MODEL.heads).map(String), 0, (i) => {
      view.head = i;
    });
    this.query = make("input", { type: "number", min: 0 });
    this.query.addEventListener("change", () => {
      view.query = this.query.value === "" ? null : Number(this.query.value);
      refreshTab();
    });
    const follow = make("button", { type: "button", textContent: "newest" });
    follow.addEventListener("click", () => {
      view.query = null;
      refreshTab();
    });
    controls.append(make("label", {}, "Query position ", this.query), follow);
    this.fact = make("p", { className: "fact" });
    host.append(controls);
    this.map = new HeatMap(host, "Attention weights: a row for each query, a column for each key", {
      grid: attentionGrid,
      table: attentionTable,
      moved: (r) => {
        view.query = r === newest() ? null : r;
        this.follow();
      },
    });
    host.append(this.fact);
    this.bars = new Bars(host, "Most weight", { bars: weightBars, table: weightTable });
  },
  follow() {
    this.query.max = newest();
    this.query.value = chosenQuery();
    this.layer.value = view.layer;
    this.bars.title.textContent = `The keys with the highest weights at ${place(chosenQuery())}`;
    this.bars.refresh();
  },
  refresh() {
    const G = MODEL.heads / MODEL.kvHeads;
    const error = now().steps[view.step].error;
    const group = `Query head ${view.head} reads KV head ${Math.floor(view.head / G)}`;
    this.fact.textContent =
      `${group}: ${G} query heads share each. ` +
      (step().fed > 1
        ? `This step has ${step().fed} queries, one row each.`
        : "This step has one query: one row.") +
      " Recomputing the output from these weights gives the model's own result to " +
      `${figures(error, 2)}.`;
    this.map.refresh();
    this.follow();
  },
};

// One row per token, just high enough to read its name, so that the whole map fits below its
// controls.
const lowRow = (cell) => Math.min(cell, 14, Math.max(10, Math.floor(360 / now().fed)));
const chosenQuery = () => Math.max(0, Math.min(view.query ?? newest(), newest()));

// The weight that a query gave to a row of the cache, at this step or an earlier one.
function look(query, key) {
  const t = now().stepOf[query];
  return t > view.step
    ? undefined
    : now().weight(t, view.layer, query - now().before[t], view.head, key);
}

// The token of a row that a query read; negative if the row is left over from before.
const keyToken = (query, key) => now().token(now().stepOf[query], view.layer, key);
const keyName = (query, key) =>
  keyToken(query, key) < 0 ? `row ${key}` : String(keyToken(query, key));

function keyPiece(query, key) {
  const token = keyToken(query, key);
  return token < 0 ? "left over" : (now().tokens[token]?.[1] ?? "");
}

function attentionGrid() {
  const run = now();
  const first = run.before[view.step];
  const last = newest();
  const keys = run.looks[view.step][view.layer].S;
  return {
    rows: run.fed,
    cols: run.widest,
    kind: "one",
    widest: 24,
    height: lowRow,
    curve: Math.sqrt,
    ends: ["weight 0", "1, colour by its square root"],
    value: (r, c) => {
      const x = look(r, c);
      // hidden by the causal mask
      return x === 0 && run.token(run.stepOf[r], view.layer, c) > r ? undefined : x;
    },
    range: () => [0, 1],
    rowName: (r) => `${tokenText(r)} ${r}`,
    colName: rowName,
    colText: rowText,
    mark: [first, last, 0, Math.max(0, keys - 1)],
    describe: (r, c) => {
      const x = look(r, c);
      const query = `query ${place(r)}`;
      return x === undefined
        ? `${query}: ${keyName(last, c)} was not read`
        : `${query}, key ${keyName(r, c)} ${quoted(keyPiece(r, c))}: weight ${figures(x)}`;
    },
  };
}

function attentionTable() {
  const first = now().before[view.step];
  const last = newest();
  const from = Math.max(first, last - 63);
  const keys = now().looks[view.step][view.layer].S;
  return {
    caption:
      `Attention of layer ${DATA.layers[view.layer]}, query head ${view.head}, ` +
      `step ${view.step}: ` +
      `queries ${from} to ${last}, a column each`,
    head: ["key", "token", ...span(last - from + 1).map((i) => `query ${from + i}`)],
    rows: span(keys).map((key) => [
      keyName(last, key),
      keyPiece(last, key),
      ...span(last - from + 1).map((i) => figures(look(from + i, key))),
    ]),
  };
}

// [[key, weight], …] of the chosen query, the highest weight first.
function weights() {
  const query = chosenQuery();
  const keys = now().looks[now().stepOf[query]][view.layer].S;
  return span(keys)
    .map((key) => [key, look(query, key)])
    .filter(([, x]) => x > 0)
    .sort((a, b) => b[1] - a[1]);
}

function keyLabel(query, key) {
  const text = keyToken(query, key) < 0 ? "left over" : short(keyPiece(query, key), 14);
  return `${keyName(query, key)} ${text}`;
}

function weightBars() {
  return {
    most: 1,
    items: weights()
      .slice(0, 10)
      .map(([key, x]) => ({
        label: keyLabel(chosenQuery(), key),
        value: x,
        text: figures(x, 3),
        marked: false,
      })),
  };
}

function weightTable() {
  return {
    caption:
      `Weights of query ${place(chosenQuery())}, layer ${DATA.layers[view.layer]}, ` +
      `query head ${view.head}, ` +
      "most first; keys that are not listed have weight 0",
    head: ["key", "token", "weight"],
    rows: weights().map(([key, x]) => [
      keyName(chosenQuery(), key),
      keyPiece(chosenQuery(), key),
      figures(x),
    ]),
  };
}
