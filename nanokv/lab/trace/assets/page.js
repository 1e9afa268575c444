// The frame of the page: header, choice of run and step, time line, tabs, and facts about the file.

const $ = (id) => document.getElementById(id);
const slider = $("step");
const SPEED = 1000; // ms per step while playing
let timer = null;
let tab = 0;

// --- steps ---------------------------------------------------------------------------------------

function goTo(n) {
  view.step = Math.max(0, Math.min(now().steps.length - 1, n));
  slider.value = view.step;
  const text = stepText();
  slider.setAttribute("aria-valuetext", text);
  $("now").textContent = text;
  paintTimeline();
  refreshTab();
}

function stepText() {
  const run = now();
  const { kind, fed, chosen } = step();
  const first = run.before[view.step];
  const next = run.before[view.step + 1];
  const what = fed > 1 ? `${fed} tokens at positions ${first} … ${next - 1}` : place(first);
  const order = `Step ${view.step} of ${run.steps.length - 1}`;
  return (
    `${order} · ${kind} · in: ${what} · out: ${quoted(run.tokens[next][1])}` +
    (differs(view.step) && ` · ${differs(view.step)}`)
  );
}

// {what: the first step at which it differs between the two runs}
function parts() {
  const { logitsStep = null, wordsStep = null, bytesStep = null } = DATA.fault ?? {};
  return { logits: logitsStep, words: wordsStep, bytes: bytesStep };
}

// A text if something differs for the first time at step n, or "".
function differs(n) {
  const parted = Object.entries(parts())
    .filter(([, at]) => at === n)
    .map(([what]) => what);
  return parted.length ? `${parted.join(" and ")} differ from here on` : "";
}

function play(on) {
  clearInterval(timer);
  timer = null;
  if (on) showPicture();
  if (on && view.step === now().steps.length - 1) goTo(0);
  if (on)
    timer = setInterval(
      () => (view.step < now().steps.length - 1 ? goTo(view.step + 1) : play(false)),
      SPEED,
    );
  $("play").textContent = timer ? "Pause" : "Play";
}

// Scrolls the picture into view before it plays.
function showPicture() {
  const picture = PANELS[tab].host.querySelector("figure");
  const { top, bottom } = picture.getBoundingClientRect();
  const bar = document.querySelector(".bar");
  const roof = bar.getBoundingClientRect().bottom;
  if (top < roof || bottom > innerHeight) scrollBy(0, top - bar.offsetHeight - 8);
}

function stepKeys(event) {
  if (event.target !== slider && event.target !== document.body) return;
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const last = now().steps.length - 1;
  const to = {
    ArrowLeft: view.step - 1,
    ArrowDown: view.step - 1,
    ArrowRight: view.step + 1,
    ArrowUp: view.step + 1,
    Home: 0,
    End: last,
    PageUp: view.step + 10,
    PageDown: view.step - 10,
  }[event.key];
  const ours =
    event.target === slider
      ? to !== undefined
      : ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key);
  if (event.key === " ") play(!timer);
  else if (ours) (play(false), goTo(to));
  else return;
  event.preventDefault();
}

// --- time line -----------------------------------------------------------------------------------

const timeline = new Figure($("timeline"), "", () => ({
  caption: "Tokens of this run",
  head: ["position", "token", "id", "role", "went in at step", "chosen at step"],
  rows: now().tokens.map(([id, piece, role], p) => [
    p,
    piece,
    id,
    ROLES[role],
    p < now().fed ? now().stepOf[p] : "never",
    p < now().promptLength ? "" : p - now().promptLength,
  ]),
}));

function buildTimeline() {
  const run = now();
  const chips = run.tokens.map(([id, piece, role], p) => {
    const chip = make(
      "li",
      { className: `token role-${role}` },
      make("span", { className: "piece", textContent: short(piece, 24) }),
      make("span", { className: "letter", textContent: role }),
      make("span", { className: "id", textContent: id }),
    );
    chip.addEventListener("click", () => goTo(p < run.fed ? run.stepOf[p] : run.steps.length - 1));
    return chip;
  });
  const prefill = make(
    "ol",
    { className: "block", "aria-label": "prefill, one step" },
    ...chips.slice(0, run.promptLength),
  );
  const decode = make(
    "ol",
    { "aria-label": "decode, one step per token" },
    ...chips.slice(run.promptLength),
  );
  const part = (title, list) =>
    make("div", { className: "part" }, make("p", { textContent: title }), list);
  timeline.body.replaceChildren(
    make(
      "div",
      { className: "strip" },
      part(`prefill · ${run.promptLength} tokens in one step`, prefill),
      part("decode · one token per step", decode),
    ),
  );
  timeline.chips = chips;
  timeline.fill();
}

function paintTimeline() {
  const first = now().before[view.step];
  const next = now().before[view.step + 1];
  const fault = DATA.fault;
  timeline.chips.forEach((chip, p) => {
    chip.classList.toggle("in", p >= first && p < next);
    chip.classList.toggle("out", p === next);
    chip.classList.toggle("later", p > next);
    chip.classList.toggle(
      "differs",
      Boolean(fault) && fault.wordsStep !== null && p === now().promptLength + fault.wordsStep,
    );
  });
  const most = timeline.chips[Math.min(next, timeline.chips.length - 1)];
  const strip = timeline.body.firstChild;
  const above = most.offsetTop;
  if (view.step === 0)
    strip.scrollTop = 0; // a run begins with its first token
  else if (
    above < strip.scrollTop ||
    above + most.offsetHeight > strip.scrollTop + strip.clientHeight
  )
    strip.scrollTop = above - 40;
}

// --- runs ----------------------------------------------------------------------------------------

function showRun(n) {
  play(false);
  view.run = n;
  slider.max = now().steps.length - 1;
  buildMarks();
  buildTimeline();
  $("fault-note").replaceChildren(...faultText());
  goTo(view.step);
}

// For a page with a fault: the answers of both runs, at the top.
function buildAnswers() {
  const { name, wordsStep } = DATA.fault;
  const titles = ["as it should be", `with the fault ${name}`];
  $("answers").replaceChildren(
    ...RUNS.map((run, i) => {
      const said = (from, to) =>
        run.tokens
          .slice(run.promptLength + from, to && run.promptLength + to)
          .map(([, piece]) => piece)
          .filter((piece) => !/^<\|.*\|>$/.test(piece))
          .join("");
      const from = wordsStep ?? run.tokens.length;
      const end = run.stopped ? ` … and breaks off: ${run.stopped}` : "";
      const words =
        wordsStep === null && i
          ? [said(0), make("span", { className: "label", textContent: " the same words" })]
          : [from ? said(0, from) : "", make("mark", { textContent: said(from) + end })];
      return make(
        "div",
        { className: i ? "answer wrong" : "answer" },
        make("p", { className: "label", textContent: titles[i] }),
        make("p", {}, ...words),
      );
    }),
  );
}

function faultText() {
  if (!DATA.fault) return [];
  const { name, about, logitsStep, wordsStep, bytesStep, deltas, tolerance } = DATA.fault;
  const link = (n) => {
    const button = make("button", { type: "button", className: "link", textContent: `step ${n}` });
    button.addEventListener("click", () => goTo(n));
    return button;
  };
  const logits =
    logitsStep === null
      ? [`The logits stay within ${figures(tolerance, 2)} of the right run.`]
      : [
          "The logits differ from ",
          link(logitsStep),
          ` on (max |Δ| ${figures(deltas[logitsStep], 3)}).`,
        ];
  const end = RUNS[1].steps.length;
  const broke = RUNS[1].stopped && wordsStep === end;
  const words =
    wordsStep === null
      ? [" The words stay the same."]
      : broke
        ? [` The run breaks off before step ${end}: ${RUNS[1].stopped}`]
        : [" The words differ from ", link(wordsStep), " on."];
  const [right, wrong] = RUNS.map((run) => count(run.steps[bytesStep ?? 0].nbytes));
  const sizes =
    bytesStep === null
      ? []
      : [" The cache has ", `${wrong} B instead of ${right} B at `, link(bytesStep), "."];
  return [
    make("strong", { textContent: `Fault ${name}` }),
    `: ${about} `,
    ...logits,
    ...words,
    ...sizes,
    " ",
    ...firstLink(),
  ];
}

function firstLink() {
  if (!DIFFERENT.length) return ["No key, value or attention weight differs."];
  const button = make("button", { type: "button", className: "link", textContent: firstText() });
  button.addEventListener("click", () => goToPlace(DIFFERENT[0]));
  return [button];
}

// Flags under the slider, one line each.
function buildMarks() {
  const found = Object.entries(parts()).filter(([, at]) => at !== null && at <= slider.max);
  $("marks").replaceChildren(
    ...found.map(([what, at], line) => {
      const mark = make("span", { textContent: `≠ ${what}` });
      const part = at / Math.max(1, slider.max);
      mark.style.left = `${100 * part}%`;
      mark.style.top = `${line}rem`;
      mark.classList.toggle("left", part > 0.7);
      return mark;
    }),
  );
  $("marks").style.height = `${found.length}rem`;
}

// --- tabs ----------------------------------------------------------------------------------------

const PANELS = [
  cachePanel,
  attentionPanel,
  positionPanel,
  logitPanel,
  costPanel,
  ...(DATA.fault ? [differencePanel] : []),
];

function buildTabs() {
  PANELS.forEach((panel, i) => {
    const button = make("button", {
      type: "button",
      role: "tab",
      id: `tab-${i}`,
      "aria-controls": `panel-${i}`,
      textContent: panel.name,
    });
    panel.host = make("div", {
      role: "tabpanel",
      id: `panel-${i}`,
      "aria-labelledby": `tab-${i}`,
      tabIndex: 0,
      hidden: true,
    });
    button.addEventListener("click", () => openTab(i));
    $("tabs").append(button);
    $("panels").append(panel.host);
    panel.build(panel.host);
  });
  $("tabs").addEventListener("keydown", (event) => {
    const n = PANELS.length;
    const to = { ArrowRight: (tab + 1) % n, ArrowLeft: (tab + n - 1) % n, Home: 0, End: n - 1 }[
      event.key
    ];
    if (to === undefined) return;
    event.preventDefault();
    openTab(to);
    $(`tab-${to}`).focus();
  });
}

function openTab(n) {
  tab = n;
  PANELS.forEach((panel, i) => {
    $(`tab-${i}`).setAttribute("aria-selected", String(i === n));
    $(`tab-${i}`).tabIndex = i === n ? 0 : -1;
    panel.host.hidden = i !== n;
  });
  refreshTab();
}

function refreshTab() {
  PANELS[tab].refresh();
}

// --- the file itself -----------------------------------------------------------------------------

function buildAbout() {
  const sizes = {
    rows: "keys and values",
    norms: "their norms",
    attention: "attention weights",
    cos: "cos of the angles",
    sin: "sin of the angles",
    logits: "top logits",
    probabilities: "their probabilities",
  };
  const rows = RUNS.flatMap((run, i) =>
    Object.entries(sizes).map(([name, what]) => {
      const { kind, count: n, largest, error } = run.arrays[name];
      return [
        `${what}${i ? ", fault" : ""}`,
        count(n),
        kind === "f2" ? "float16" : "float32",
        figures(largest, 3),
        figures(error, 2),
      ];
    }),
  );
  const figure = new Figure($("about-body"), "Numbers in this file", () => ({
    caption: "Numbers in this file and how far rounding moved any of them at most",
    head: ["what", "numbers", "stored as", "largest", "max rounding error"],
    rows,
  }));
  figure.body.remove();
  figure.readout.remove();
  figure.toggle();
  const worst = Math.max(
    ...RUNS.flatMap((run) =>
      Object.values(run.arrays).map(({ error, largest }) => (largest ? error / largest : 0)),
    ),
  );
  $("about-body").prepend(
    make("p", {
      textContent:
        `Hooks read these tensors while nanokv ${DATA.version} ran ${MODEL.name} (fingerprint ` +
        `${MODEL.fingerprint}) greedily on the dict cache; ` +
        "they change nothing in the run. Attention weights are computed from the queries, " +
        "keys and mask that the kernel was called with. " +
        `Numbers are rounded to float16 for this file: by at most ${figures(worst, 2)} of the ` +
        "largest of their kind.",
    }),
  );
}

function buildHeader() {
  const { name, parameters, dtype } = MODEL;
  const layers = DATA.layers.length;
  $("version").textContent = DATA.version;
  $("model-name").textContent = name;
  $("fault-name").textContent = DATA.fault?.name ?? "";
  $("prompt").textContent = DATA.prompt;
  $("meta").textContent = [
    `${count(parameters)} parameters`,
    dtype,
    layers === MODEL.layers
      ? `${layers} layers`
      : `layers ${DATA.layers.join(", ")} of ${MODEL.layers}`,
    `${MODEL.heads} query heads over ${MODEL.kvHeads} KV heads of ${MODEL.headDim}`,
    "cache dict",
    "greedy",
  ].join(" · ");
  const used = [...new Set(RUNS[0].tokens.map(([, , role]) => role))];
  $("roles").replaceChildren(
    ...used.map((role) =>
      make(
        "span",
        { className: `role role-${role}` },
        make("b", { textContent: role }),
        ` ${ROLES[role]}`,
      ),
    ),
    signsUsed(),
  );
}

// The signs on this page for invisible characters, with their meanings.
function signsUsed() {
  const texts = RUNS.flatMap((run) => run.tokens.map(([, piece]) => short(piece))).join(" ");
  const signs = [
    ["␣", "space"],
    ["↵", "newline"],
    ["⇥", "tab"],
    ["‹", "‹e2 96› bytes of a character that other tokens complete"],
    ["×", "␣×8 eight of them"],
  ];
  return signs
    .filter(([sign]) => texts.includes(sign))
    .map(([sign, what]) => (what.startsWith(sign) || sign === "×" ? what : `${sign} ${what}`))
    .join(" · ");
}

// The page around this frame sends the theme that its reader chose.
function dress({ source, data }) {
  if (source !== parent || !["dark", "light"].includes(data?.theme)) return;
  wear(data.theme);
  refreshTab();
}

function start() {
  buildHeader();
  buildTabs();
  buildAbout();
  tour.build();
  $("runs").hidden = $("fault-note").hidden = $("answers").hidden = !DATA.fault;
  if (DATA.fault) buildAnswers();
  slider.addEventListener("input", () => {
    play(false);
    goTo(Number(slider.value));
  });
  document.addEventListener("keydown", stepKeys);
  $("play").addEventListener("click", () => play(!timer));
  $("show-ids").addEventListener("change", (event) =>
    document.body.classList.toggle("with-ids", event.target.checked),
  );
  for (const radio of document.getElementsByName("run"))
    radio.addEventListener("change", () => showRun(Number(radio.value)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refreshTab);
  addEventListener("message", dress);
  openTab(0);
  showRun(0);
  if (!DATA.fault) return;
  openTab(PANELS.indexOf(differencePanel));
  goToPlace(DIFFERENT[0]);
}

start();
