// The tab "Positions": the angles by which queries and keys were rotated.

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
    this.map = new HeatMap(
      host,
      "cos of the angle: a row for each pair of dimensions, a column for each position",
      {
        grid: angleGrid,
        table: angleTable,
        moved: (r, c) => {
          view.position = c;
          view.pair = r;
          this.draw();
        },
      },
    );
  },
  draw() {
    const fed = chosenPosition();
    this.dials.title.textContent =
      `Angles of ${place(fed)}: ` + "each pair i turns at its own speed from position to position";
    this.hands.setAttribute("aria-label", `${PAIRS} dials; the table has their numbers`);
    this.hands.replaceChildren(...span(PAIRS).map((pair) => dial(pair, ...now().angle(fed, pair))));
    this.dials.fill();
  },
  refresh() {
    const { start, fed, positions } = step();
    const range = (a, n) => (n > 1 ? `${a} … ${a + n - 1}` : `${a}`);
    const right = positions.every((p, i) => p === now().before[view.step] + i);
    this.fact.textContent =
      `The model was called with start_pos ${start} for ${plural(fed, "token")}; ` +
      `the angles it used are those of position ${range(positions[0], fed)}. ` +
      (right
        ? "They are the tokens' own positions."
        : `Their own ${fed > 1 ? "positions are" : "position is"} ` +
          `${range(now().before[view.step], fed)}: these angles are wrong.`) +
      ` Dimensions i and i + ${PAIRS} form pair i and turn by θ^(−2i/${MODEL.headDim}) radians ` +
      `per position, θ = ${count(MODEL.ropeTheta)}.`;
    this.draw();
    this.map.refresh();
  },
};

function dial(pair, cos, sin) {
  const svg = shape(
    "svg",
    { viewBox: "-12 -12 24 24", class: pair === view.pair ? "dial chosen" : "dial" },
    shape("title", {}, `pair ${pair}: ${figures(Math.atan2(sin, cos))} rad`),
    shape("circle", { r: 10 }),
    shape("line", { x1: 0, y1: 0, x2: 9 * cos, y2: -9 * sin }),
  );
  return make("div", {}, svg, make("span", { textContent: pair }));
}

function angleGrid() {
  const last = newest();
  const first = now().before[view.step];
  return {
    rows: PAIRS,
    cols: now().fed,
    kind: "two",
    height: () => 12,
    value: (r, c) => (c > last ? undefined : now().angle(c, r)[0]),
    range: () => [-1, 1],
    rowName: (r) => String(r),
    colName: (c) => String(c),
    colText: tokenText,
    mark: [0, PAIRS - 1, first, last],
    describe: (r, c) =>
      c > last
        ? `pair ${r}, ${place(c)}: not computed yet`
        : `pair ${r}, ${place(c)}: cos ${figures(now().angle(c, r)[0])}, ` +
          `sin ${figures(now().angle(c, r)[1])}`,
  };
}

function angleTable() {
  return {
    caption: `cos of the angles up to step ${view.step}`,
    head: ["position", "token", ...span(PAIRS).map((pair) => `pair ${pair}`)],
    rows: span(newest() + 1).map((p) => [
      p,
      now().tokens[p][1],
      ...span(PAIRS).map((pair) => figures(now().angle(p, pair)[0], 3)),
    ]),
  };
}

function dialTable() {
  const fed = chosenPosition();
  return {
    caption: `Angles of ${place(fed)}`,
    head: ["pair", "dimensions", "radians per position", "cos", "sin", "angle in radians"],
    rows: span(PAIRS).map((pair) => {
      const [cos, sin] = now().angle(fed, pair);
      return [
        pair,
        `${pair}, ${pair + PAIRS}`,
        figures(MODEL.ropeSpeeds[pair]),
        figures(cos),
        figures(sin),
        figures(Math.atan2(sin, cos)),
      ];
    }),
  };
}
