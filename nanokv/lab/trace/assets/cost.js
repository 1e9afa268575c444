// The tab "Cost": tokens, time and bytes with and without a cache.

const sum = (list, until) => list.slice(0, until + 1).reduce((a, b) => a + b, 0);
const milli = (x) => `${figures(x, 3)} ms`;

const costPanel = {
  name: "Cost",
  build(host) {
    const { repeat, uncached, difference } = DATA.costs;
    const both = uncached.length
      ? " Without a cache nanokv.score runs the whole text again at every step; " +
        `its logits differ by at most ${figures(difference, 2)}.`
      : " The run without a cache was not measured.";
    host.append(
      make("p", { className: "fact whole", textContent: wholeRun() }),
      make("p", {
        className: "fact",
        textContent:
          `Times are medians of ${plural(repeat, "repeat")} without recording, ` +
          `on this machine (${DATA.machine}).${both}`,
      }),
    );
    this.cards = make("div", { className: "cards" });
    host.append(this.cards);
    this.times = new Lines(host, "Milliseconds of each step", {
      lines: timeLines,
      table: timeTable,
      picked: (i) => goTo(i),
    });
    this.work = new Lines(host, "Tokens through the model, so far", {
      lines: workLines,
      table: workTable,
      picked: (i) => goTo(i),
    });
  },
  refresh() {
    const at = costStep();
    const { cached, uncached } = DATA.costs;
    const read = MODEL.weightBytes + RUNS[0].steps[at].nbytes;
    const card = (title, ...lines) =>
      make(
        "div",
        { className: "card" },
        make("h3", { textContent: title }),
        make(
          "dl",
          {},
          ...lines.flatMap(([name, text]) => [
            make("dt", { textContent: name }),
            make("dd", { textContent: text }),
          ]),
        ),
      );
    this.cards.replaceChildren(
      card(
        `Step ${at}, with the cache`,
        [
          "tokens through the model",
          `${plural(fedAt(at), "token")}, ${count(RUNS[0].before[at + 1])} so far`,
        ],
        ["time", `${milli(cached[at])}, ${milli(sum(cached, at))} so far`],
        [
          "bytes read at least",
          `${bytes(MODEL.weightBytes)} weights + ${bytes(RUNS[0].steps[at].nbytes)} cache = ` +
            `${bytes(read)}`,
        ],
      ),
      ...(uncached.length
        ? [
            card(
              `Step ${at}, without a cache`,
              [
                "tokens through the model",
                `${plural(again(at), "token")}, ${count(sum(span(at + 1).map(again), at))} so far`,
              ],
              ["time", `${milli(uncached[at])}, ${milli(sum(uncached, at))} so far`],
              ["bytes read at least", `${bytes(MODEL.weightBytes)} weights`],
            ),
          ]
        : []),
    );
    this.times.refresh();
    this.work.refresh();
  },
};

// The totals come first, because a single step may take longer with a cache, especially the
// prefill.
function wholeRun() {
  const { cached, uncached } = DATA.costs;
  const last = cached.length - 1;
  const took = sum(cached, last);
  const begin =
    `The whole run, ${plural(cached.length, "step")}: ` +
    `${count(RUNS[0].before[last + 1])} tokens through the model in ${milli(took)} with the cache`;
  if (!uncached.length) return `${begin}.`;
  const fed = sum(span(cached.length).map(again), last);
  const alone = sum(uncached, last);
  return (
    `${begin}, ${count(fed)} tokens in ${milli(alone)} without, ` +
    `${figures(alone / took, 2)} times as long.`
  );
}

const costStep = () => Math.min(view.step, DATA.costs.cached.length - 1);
const fedAt = (i) => RUNS[0].steps[i].fed;
const again = (i) => RUNS[0].before[i + 1]; // tokens that step i feeds without a cache: all so far

function pairOf(cached, uncached, unit) {
  const series = [{ name: "with the cache", values: cached }];
  if (DATA.costs.uncached.length) series.push({ name: "without", values: uncached });
  return {
    series,
    unit,
    at: costStep(),
    describe: (i) =>
      `step ${i}: ${series.map(({ name, values }) => `${unit(values[i])} ${name}`).join(", ")}`,
  };
}

const timeLines = () => pairOf(DATA.costs.cached, DATA.costs.uncached, (x) => milli(x));
const workLines = () => {
  const steps = span(DATA.costs.cached.length);
  return pairOf(
    steps.map((i) => RUNS[0].before[i + 1]),
    steps.map((i) => sum(steps.map(again), i)),
    (x) => count(Math.round(x)),
  );
};

function costTable(caption, { series, unit }) {
  return {
    caption,
    head: ["step", ...series.map(({ name }) => name)],
    rows: series[0].values.map((_, i) => [i, ...series.map(({ values }) => unit(values[i]))]),
  };
}
const timeTable = () => costTable("Milliseconds of each step", timeLines());
const workTable = () => costTable("Tokens through the model up to each step", workLines());
