// The tour: eight steps that explain the page with this recording's figures. It is offered and does
// not start by itself.

const SEEN_KEY = "nanokv-trace-tour";
const run0 = RUNS[0];
const lastStep = run0.steps.length - 1;
const piece = (position) => quoted(run0.tokens[position][1]);
const vectorSize = MODEL.kvHeads * MODEL.headDim;
const layersHeld =
  DATA.layers.length === MODEL.layers
    ? plural(MODEL.layers, "layer")
    : `${MODEL.layers} layers, of which this page shows ${DATA.layers.length}`;
const spent = (times, until = times.length - 1) => milli(sum(times, until));

// Moves the page to a step and a tab. Returns the elements to highlight.
function show(panel, step, ...elements) {
  if (view.run) $("runs").querySelector("input").click();
  play(false);
  goTo(step);
  openTab(PANELS.indexOf(panel));
  return elements;
}

// [layer, row] of the largest key norm at the end of the run.
function largestKey() {
  let best = [0, 0];
  let most = -1;
  run0.cache.forEach((steps, layer) =>
    steps[lastStep].forEach((_, row) => {
      const x = run0.norm(lastStep, layer, row, 0, -1);
      if (x > most) {
        most = x;
        best = [layer, row];
      }
    }),
  );
  return best;
}

let clearest = null;

// Does a word of the answer read a word of the prompt?
function telling(position, key) {
  const [asks, read] = [position, key].map((at) => run0.tokens[at]);
  const word = /[\p{L}\p{N}]/u;
  return (
    position >= run0.promptLength &&
    ["u", "p"].includes(read[2]) &&
    word.test(asks[1]) &&
    word.test(read[1]) &&
    run0.tokens[key - 1]?.[1] !== "<|im_start|>"
  );
}

// The query that gives one earlier token the highest weight. The first token is left out, because
// it gets much weight everywhere.
function clearestLook() {
  if (clearest) return clearest;
  let best = null;
  run0.looks.forEach((layers, t) =>
    layers.forEach(({ counts }, layer) =>
      counts.forEach((n, query) => {
        if (t < Math.min(1, lastStep)) return;
        for (let head = 0; head < MODEL.heads; head++)
          for (let key = Math.min(1, n - 1); key < Math.max(1, n - 1); key++) {
            const weight = run0.weight(t, layer, query, head, key);
            const position = run0.before[t] + query;
            // A clear weight between words comes first.
            const worth = weight + (weight > 0.3 && telling(position, key));
            if (!best || worth > best.worth)
              best = { t, layer, head, key, weight, position, worth };
          }
      }),
    ),
  );
  return (clearest = best);
}

const STOPS_OF_TOUR = [
  {
    title: "What a KV cache is",
    say: () => [
      "A model writes one token at a time, and attention lets each new token read every token " +
        "before it.",
      "For this each layer computes two vectors per token: a key, by which the token is found, " +
        "and a value, which is read from it.",
      "Both stay the same afterwards, so they are kept and not computed again. " +
        "This is the KV cache.",
      `At the end of this run it holds ${plural(run0.fed, "token")} in ${layersHeld}: ` +
        "a column per token, a row per layer.",
    ],
    show: () => show(cachePanel, lastStep, cachePanel.maps[0].element),
  },
  {
    title: "Prefill",
    say: () => [
      `Step 0 is the prefill. ${plural(run0.promptLength, "token")} of the prompt ` +
        `${run0.promptLength === 1 ? "goes" : "go"} through the model in one pass, ` +
        `in ${spent(DATA.costs.cached, 0)}.`,
      `The pass fills ${plural(run0.before[1], "column")} of the cache, framed in the map.`,
      "The logits after the last of these tokens choose the first token of the answer: " +
        `${piece(run0.promptLength)}.`,
    ],
    show: () =>
      show(cachePanel, 0, cachePanel.maps[0].element, timeline.element.querySelector(".block")),
  },
  {
    title: "Decode",
    say: () =>
      lastStep === 0
        ? [
            "This recording ends after the prefill.",
            "With -n 2 or more it would go on: each further step feeds one token.",
          ]
        : [
            `Each later step feeds one token. Step 1 feeds ${piece(run0.before[1])}, ` +
              "which step 0 chose.",
            "Only this token's keys and values are computed: one new column, framed in the map.",
            `Its attention reads ${count(run0.before[2])} columns, ` +
              `${count(run0.before[1])} of them out of the cache.`,
            `Step 1 took ${milli(DATA.costs.cached[1])}, the prefill ` +
              `${milli(DATA.costs.cached[0])}.`,
          ],
    show: () => show(cachePanel, 1, cachePanel.maps[0].element, timeline.chips[run0.before[1]]),
  },
  {
    title: "What reuse saves",
    say: () => {
      const all = sum(span(costStep() + 1).map(again), costStep());
      const fed = run0.before[costStep() + 1];
      return [
        "Without a cache each step computes all tokens again: " +
          `${plural(all, "token")} through the model in ${plural(costStep() + 1, "step")}.`,
        `With the cache it is ${plural(fed, "token")}; without it ${figures(all / fed, 3)} ` +
          "times as many.",
        DATA.costs.uncached.length
          ? `All steps took ${spent(DATA.costs.cached)} with the cache and ` +
            `${spent(DATA.costs.uncached)} without, on this machine.`
          : `All steps took ${spent(DATA.costs.cached)} with the cache; ` +
            "the run without one was not timed for this page.",
      ];
    },
    show: () => show(costPanel, lastStep, costPanel.cards, costPanel.work.element),
  },
  {
    title: "Attention reads the cache",
    say: () => {
      const { t, layer, head, key, weight, position } = clearestLook();
      return [
        `At step ${t} position ${position} ${piece(position)} compares its query with ` +
          `${plural(run0.looks[t][layer].counts[position - run0.before[t]], "key")}, ` +
          `here in layer ${DATA.layers[layer]}, query head ${head}.`,
        "Each key gets a weight, and the weights add up to 1. " +
          `Position ${key} ${piece(key)} gets ${figures(weight, 3)}.` +
          (run0.tokens[position + 1]?.[0] === run0.tokens[key][0]
            ? " This step then chooses the same token: the head helps to copy it."
            : ""),
        "The head's output is the sum of the values, each times its weight.",
      ];
    },
    show: () => {
      const { t, layer, head, key, position } = clearestLook();
      Object.assign(view, { layer, head, query: position });
      attentionPanel.head.value = head;
      const found = show(
        attentionPanel,
        t,
        attentionPanel.map.element,
        attentionPanel.bars.element,
      );
      attentionPanel.map.move(position, key);
      attentionPanel.map.reveal(key);
      return found;
    },
    map: () => attentionPanel.map,
  },
  {
    title: "Why a norm is drawn",
    say: () => {
      const [layer, row] = largestKey();
      return [
        `The key of position ${row} ${piece(row)} in layer ${DATA.layers[layer]} has ` +
          `${count(vectorSize)} numbers, ` +
          `${plural(MODEL.kvHeads, "KV head")} of ${MODEL.headDim}. ` +
          "A cell has room for one number.",
        "It is the norm, the length of the vector: here " +
          `${figures(run0.norm(lastStep, layer, row, 0, -1))}, the largest of all keys.`,
        "The longer a key is, the further it can move the scores of attention.",
        `A norm does not show a direction, so all ${count(vectorSize)} numbers of the chosen ` +
          "cell are drawn below the maps.",
      ];
    },
    show: () => {
      view.kvHead = -1;
      cachePanel.head.value = 0;
      const found = show(
        cachePanel,
        lastStep,
        cachePanel.maps[0].element,
        cachePanel.vector.element,
      );
      cachePanel.maps[0].move(...largestKey());
      cachePanel.maps[0].reveal(largestKey()[1]);
      return found;
    },
    map: () => cachePanel.maps[0],
  },
  {
    title: "What each token adds",
    say: () => [
      `A token adds 2 (key and value) × ${MODEL.layers} layers × ` +
        `${plural(MODEL.kvHeads, "KV head")} × ${MODEL.headDim} numbers × ${MODEL.itemsize} B ` +
        `= ${count(MODEL.bytesPerToken)} B.`,
      `The cache has ${count(run0.steps[0].nbytes)} B after step 0 and ` +
        `${count(run0.steps[lastStep].nbytes)} B at the end, for ${plural(run0.fed, "token")}.`,
      `The weights have ${bytes(MODEL.weightBytes)}. ${asLarge()}`,
    ],
    show: () => show(cachePanel, lastStep, cachePanel.bytes.element, cachePanel.fact),
  },
  {
    title: "A fault",
    say: () =>
      DATA.fault
        ? [
            "This page holds the run a second time, under a known bug: " +
              `${DATA.fault.about.split(/\. (?=[A-Z])/)[0].replace(/\.$/, "")}.`,
            firstText(),
            wordsText(),
          ]
        : [
            "A wrong cache often still writes fluent text, so a bug is found by comparing " +
              "numbers, such as these logits.",
            'The command nanokv trace "What is a KV cache?" --fault start_pos_restarts records ' +
              "a run twice: right, and under a known bug.",
            "Its page opens at the first key, value or weight that differs.",
          ],
    show: () => {
      if (!DATA.fault) return show(logitPanel, lastStep, logitPanel.bars.element);
      show(differencePanel, DIFFERENT[0]?.step ?? 0);
      goToPlace(DIFFERENT[0]);
      return [differencePanel.fact, differencePanel.map.element];
    },
  },
];

// The number of tokens whose cache is as large as the weights, in a sentence.
function asLarge() {
  const tokens = Math.ceil(MODEL.weightBytes / MODEL.bytesPerToken);
  if (tokens <= MODEL.context) return `A cache of ${count(tokens)} tokens is as large.`;
  return (
    `A cache of ${count(tokens)} tokens would be as large; ` +
    `this model's context ends at ${count(MODEL.context)}.`
  );
}

// A run that broke off has words only up to that step.
function wordsText() {
  const { wordsStep } = DATA.fault;
  const [right, wrong] = RUNS.map((run) => run.steps[wordsStep]?.chosen);
  if (wordsStep === null)
    return "The words are the same in both runs, so the answer does not show the bug.";
  if (right === undefined || wrong === undefined)
    return `The words are the same up to step ${wordsStep}, where one of the runs ends.`;
  const [a, b] = RUNS.map((run) => quoted(run.tokens[run.promptLength + wordsStep][1]));
  return `The words differ from step ${wordsStep} on: right ${a}, wrong ${b}.`;
}

const tour = {
  at: null, // the number of the stop, null when closed
  lit: [],
  go(n) {
    if (n < 0) return;
    if (n >= STOPS_OF_TOUR.length) return this.close();
    const opened = this.at === null;
    const stop = STOPS_OF_TOUR[n];
    this.at = n;
    document.body.classList.add("touring");
    $("tour").hidden = false;
    this.light(stop.show());
    if (stop.map) this.lift(stop.map());
    this.dim();
    $("tour-count").textContent = `${n + 1} of ${STOPS_OF_TOUR.length}`;
    $("tour-title").textContent = stop.title;
    $("tour-text").textContent = stop.say().join(" ");
    $("tour-back").setAttribute("aria-disabled", String(n === 0));
    $("tour-next").textContent = n === STOPS_OF_TOUR.length - 1 ? "Finish" : "Next";
    if (opened) $("tour").focus({ preventScroll: true });
  },
  light(elements) {
    this.lit.forEach((element) => element.classList.remove("lit"));
    this.lit = elements;
    elements.forEach((element) => element.classList.add("lit"));
    const before = elements[0].previousElementSibling;
    const controls = before?.classList.contains("controls") ? before : elements[0];
    const beside = getComputedStyle($("tour")).position === "fixed"; // where there is room
    this.put(beside ? controls : elements[0]);
    (beside ? controls : $("tour")).scrollIntoView({ block: "start" });
  },
  put(before) {
    // a node that moves loses the focus
    const focused = document.activeElement;
    const own = $("tour").contains(focused);
    before.before($("tour"));
    if (own) focused.focus({ preventScroll: true });
  },
  lift(map) {
    // the row under discussion moves up from below the window
    const { top, height } = map.layout;
    const y = map.canvas.getBoundingClientRect().top + top + height * map.cursor[0];
    if (y > innerHeight - 24) scrollBy(0, y - innerHeight + 40);
  },
  dim() {
    // of several lit parts, those that are out of sight
    this.lit.slice(1).forEach((element) => {
      const box = element.getBoundingClientRect();
      if (box.bottom < 40 || box.top > innerHeight - 40) element.classList.remove("lit");
    });
  },
  close() {
    this.at = null;
    this.lit.forEach((element) => element.classList.remove("lit"));
    this.lit = [];
    $("tour").hidden = true;
    this.put(document.querySelector(".bar"));
    document.body.classList.remove("touring");
    this.remember();
    $("tour-start").focus();
  },
  // Without storage, or if the browser blocks it, the page offers the tour again.
  remember() {
    try {
      localStorage.setItem(SEEN_KEY, "seen");
    } catch {
      /* storage is blocked */
    }
    this.offer(true);
  },
  seen() {
    try {
      return localStorage.getItem(SEEN_KEY) === "seen";
    } catch {
      return false;
    }
  },
  offer(seen) {
    $("tour-start").textContent = seen ? "Tour again" : "Take the tour";
    $("tour-offer").textContent = seen ? "" : `${STOPS_OF_TOUR.length} stops`;
  },
  keys(event) {
    const onCard = event.target === $("tour") && !event.repeat; // not on one of its buttons
    const to = { ArrowRight: 1, ArrowLeft: -1, Enter: onCard ? 1 : 0 }[event.key];
    if (to) (this.go(this.at + to), event.preventDefault());
  },
  build() {
    $("tour-start").addEventListener("click", () => this.go(0));
    $("tour-back").addEventListener("click", () => this.go(this.at - 1));
    $("tour-next").addEventListener("click", () => this.go(this.at + 1));
    $("tour-close").addEventListener("click", () => this.close());
    $("tour").addEventListener("keydown", (event) => this.keys(event));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.at !== null) this.close();
    });
    this.offer(this.seen());
  },
};
