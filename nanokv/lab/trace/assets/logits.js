// The tab "Logits": the ten highest logits of a step.

const logitPanel = {
  name: "Logits",
  build(host) {
    this.fact = make("p", { className: "fact" });
    host.append(this.fact);
    this.bars = new Bars(host, "", { bars: logitBars, table: logitTable });
  },
  refresh() {
    const run = now();
    const n = run.before[view.step + 1];
    this.fact.textContent =
      `After ${plural(n, "token")} the highest logit decides, temperature 0: ` +
      `${quoted(run.tokens[n][1])} (id ${run.tokens[n][0]}) becomes token ${n}.` +
      faultFact();
    this.bars.title.textContent =
      `Top ${step().top.length} of ${count(MODEL.vocabulary)}: ` +
      "probability at temperature 1, and the logit";
    this.bars.refresh();
  },
};

function faultFact() {
  const delta = DATA.fault?.deltas[view.step];
  if (!DATA.fault || delta === undefined) return "";
  return ` Right and faulted run differ by max |Δ logit| ${figures(delta, 3)} at this step.`;
}

const percent = (p) => (p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);

const topRows = () =>
  step().top.map(([id, piece], i) => {
    const at = view.step * step().top.length + i;
    return { id, piece, logit: now().logits[at], probability: now().probabilities[at] };
  });

function logitBars() {
  return {
    most: 1,
    items: topRows().map(({ id, piece, logit, probability }) => ({
      label: short(piece, 14),
      value: probability,
      marked: id === step().chosen,
      text: `${percent(probability)}  ·  ${figures(logit)}`,
    })),
  };
}

function logitTable() {
  return {
    caption: `Top ${step().top.length} logits after step ${view.step}`,
    head: ["rank", "id", "token", "logit", "probability", "chosen"],
    rows: topRows().map(({ id, piece, logit, probability }, i) => [
      i + 1,
      id,
      piece,
      figures(logit),
      figures(probability),
      id === step().chosen ? "yes" : "",
    ]),
  };
}
