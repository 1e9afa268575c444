"use strict";
// The page: the user enters a sentence; the answer, its cache and its cost appear frame by frame.

const LONGEST = 400;
const ANSWER = 120; // tokens of an answer; LONGEST: of a conversation
const REST = 1500; // milliseconds at the last token, before the clearest look is shown
const SLICE = 6; // milliseconds of each frame for the lane without a cache
const SPARE = 11; // the same, if nothing moves in the frame
const $ = (id) => document.getElementById(id);
const began = performance.now();
const DATA = JSON.parse($("data").textContent);
const tokenizer = new Tokenizer(DATA.tokenizer);
const model = new Model(DATA.config, readSafetensors(fromBase64($("weights").textContent)));
$("weights").remove();
const still = matchMedia("(prefers-reduced-motion: reduce)");
const times = {
  ready: performance.now(),
  load: performance.now() - began,
  first: 0,
  warm: 0,
  frames: [],
};

const stage = new Stage($("stage"), DATA.config.head_dim);
const triangles = new Triangles($("triangles"));
const chat = {
  // the state that is shown
  messages: [],
  looks: new Looks(model),
  lane: null,
  again: null,
  todo: [],
  steps: [],
  next: null,
  words: [],
  position: -1,
  fresh: 0,
  running: false,
  playing: true,
  since: 0,
  asked: 0,
  dirty: true,
  rest: null,
};

function newChat() {
  // an empty cache
  chat.messages = [];
  chat.looks = new Looks(model);
  chat.steps = [];
  chat.todo = [];
  chat.lane = new Lane(model, makeCache("dict", model), chat.looks.how);
  chat.again = new ForgetfulLane(model, makeCache("dict", model));
  chat.position = -1;
  chat.running = false;
  chat.next = null;
  chat.words = [];
  chat.rest = null;
  stage.repaint();
}

// --- an answer -----------------------------------------------------------------------------------

function say(sentence) {
  // a turn: prefill the new part of the conversation, then continue in the loop of frames
  const messages = [
    ...chat.messages,
    { role: "user", content: sentence.toWellFormed?.() ?? sentence },
  ];
  const ids = tokenizer.encode(tokenizer.render(messages));
  if (ids.length > LONGEST) return refuse(ids.length);
  chat.asked = performance.now();
  chat.messages = messages;
  chat.words = [];
  chat.todo = [];
  chat.running = true;
  chat.playing = true;
  // the tokens of a stopped answer may differ when its text is encoded again
  const kept = common(chat.lane.ids, ids);
  chat.looks.keep(kept);
  stage.keep(kept);
  ask(chat.lane, ids);
  chat.steps = chat.steps.filter(({ tokens }) => tokens <= kept);
  chat.again.ids = ids.slice(0, kept);
  chat.again.waiting = [];
  chat.todo = [ids.slice(kept)];
  take(ids.length - kept);
  times.first = performance.now() - chat.asked;
}

function refuse(tokens) {
  $("words").textContent =
    `That makes ${count(tokens)} tokens, and this page shows at most ${LONGEST}: ` +
    "start a new chat, or write a shorter message.";
}

function take(fresh) {
  // compute the lane's waiting tokens, and choose the next token
  const logits = chat.lane.go();
  const length = chat.lane.ids.length;
  chat.next = largest(logits);
  chat.fresh = length - fresh;
  chat.position = length - 1;
  chat.since = performance.now();
  chat.dirty = true;
  chat.steps.push({ tokens: length, fresh, again: 0, chosen: chat.next });
  const over = DATA.ends.includes(chat.next) || chat.words.length === ANSWER;
  if (!over) chat.words.push(chat.next);
  if (over) finish();
  write();
}

function advance() {
  // one token on: its key and value join the cache
  chat.lane.begin([chat.next]);
  chat.todo.push([chat.next]);
  take(1);
}

function finish() {
  chat.running = false;
  chat.rest = clearest();
  const content = tokenizer.decode(chat.words);
  chat.messages.push({ role: "assistant", content });
  $("said").textContent = `The model answers: ${content}`;
}

function clearest() {
  // for the last picture: the token of the answer that gives one token the highest weight,
  // preferably a word
  const first = chat.lane.ids.length - chat.words.length;
  const heads = [$("layer"), $("head")].map(({ value }) => Number(value));
  const sure = chat.words.map((_, n) => {
    const { weights: found, strongest } = chat.looks.at(first + n, ...heads, chat.lane.cache);
    return found[strongest] + /^ \p{L}/u.test(tokenizer.piece(chat.lane.ids[strongest]));
  });
  return sure.length ? first + largest(sure) : null;
}

function computeAgain(until) {
  // the same without a cache, until the frame's time is used up
  const { again, todo, steps } = chat;
  while (performance.now() < until && (again.waiting.length || todo.length)) {
    if (!again.waiting.length) again.begin(todo.shift());
    const step = steps[steps.length - 1 - todo.length];
    const logits = again.go(1);
    step.again = step.tokens - again.waiting.length;
    if (logits) step.same = largest(logits) === step.chosen;
    chat.dirty = true;
  }
}

const caughtUp = () => !chat.again.waiting.length && !chat.todo.length;

function frame(now) {
  if (chat.position >= 0) {
    const pace = Number($("pace").value);
    const atEnd = chat.position === chat.lane.ids.length - 1;
    const rested = performance.now() - chat.since >= pace && (pace === 0 || caughtUp());
    if (chat.running && chat.playing && atEnd && rested) advance();
    if (!chat.running && chat.rest !== null && performance.now() - chat.since > REST) {
      chat.position = chat.rest;
      chat.rest = null;
      chat.since = performance.now();
      chat.dirty = true;
    }
    const moving = performance.now() - chat.since < movement() + 50;
    computeAgain(performance.now() + (chat.running || moving ? SLICE : SPARE));
    if (chat.dirty || moving) draw();
    times.frames.push(now);
    if (times.frames.length > 600) times.frames.shift();
  }
  requestAnimationFrame(frame);
}

// --- output --------------------------------------------------------------------------------------

const movement = () => (still.matches ? 0 : Math.min(900, Number($("pace").value)));

function shown(id) {
  // a token on the stage
  const piece = tokenizer.piece(id);
  return short(
    piece.replaceAll("\n", "↵").replace("<|im_start|>", "start").replace("<|im_end|>", "end"),
    9,
  );
}

function labels(ids) {
  // tokens of the template, which the user did not type, in a softer colour
  let inside = false;
  return ids.map((id, i) => {
    const piece = tokenizer.piece(id);
    if (piece === "<|im_start|>") inside = true;
    const soft =
      inside ||
      tokenizer.special.has(piece) ||
      (piece === "\n" && tokenizer.piece(ids[i - 1]) === "<|im_end|>");
    if (inside && piece === "\n") inside = false;
    return { text: shown(id), soft };
  });
}

function look() {
  if (chat.position < 0) return null;
  return chat.looks.at(
    chat.position,
    Number($("layer").value),
    Number($("head").value),
    chat.lane.cache,
  );
}

function draw() {
  const now = look();
  const newest = chat.position === chat.lane.ids.length - 1;
  const took = movement();
  const t = took ? Math.min(1, (performance.now() - chat.since) / took) : 1;
  stage.draw(now, labels(chat.lane.ids), newest ? chat.fresh : chat.lane.ids.length, t);
  triangles.draw(chat.steps);
  counters();
  tell(now);
  chat.dirty = false;
}

function write() {
  // the answer so far; the newest piece is marked
  const text = tokenizer.decode(chat.words);
  const before = tokenizer.decode(chat.words.slice(0, -1));
  const newest = make("span", {
    className: chat.running ? "now" : "",
    textContent: text.slice(before.length),
  });
  $("words").replaceChildren(before, newest);
  $("answer").scrollTop = $("answer").scrollHeight;
  $("play").disabled = !chat.running;
  $("clear").hidden = false;
}

const clock = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms)} ms`);
const large = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} G` : `${Math.round(n / 1e6)} M`);

function counters() {
  for (const [lane, name] of [
    [chat.lane, "with"],
    [chat.again, "without"],
  ]) {
    $(`rows-${name}`).textContent = count(lane.rows);
    $(`adds-${name}`).textContent = large(lane.multiplyAdds);
    $(`time-${name}`).textContent = clock(lane.milliseconds);
  }
  const done = chat.steps.filter((step) => step.same !== undefined);
  const differ = done.filter((step) => !step.same).length;
  $("same").textContent = differ
    ? `${differ} of ${done.length} tokens differ.`
    : done.length
      ? `Both run in this page. The same token, ${done.length} of ${done.length} times.`
      : "Both run in this page.";
  const tokens = chat.lane.ids.length;
  $("held").textContent = tokens
    ? `${plural(tokens, "token")}, ${bytes(chat.lane.cache.nbytes)}`
    : "empty";
  $("once").hidden = !tokens;
}

const name = (id) => quoted(spaced(tokenizer.piece(id).replaceAll("\n", "↵")));
const place = () => `layer ${$("layer").value}, head ${$("head").value}`;

function tell(now) {
  // the step in one sentence
  const {
    lane: { ids },
    position,
  } = chat;
  // none for a token inside the prompt
  const step = chat.steps.find(({ tokens }) => tokens === position + 1);
  const end = step && DATA.ends.includes(step.chosen);
  const then = !step
    ? "."
    : end
      ? ", and the answer ends."
      : `, and the model writes ${name(step.chosen)}.`;
  put(
    $("readout"),
    `The query of ${name(ids[position])} takes ${percent(now.weights[now.strongest])} of its mix from ` +
      `${name(ids[now.strongest])}${then}`,
  );
  $("stage").setAttribute(
    "aria-label",
    `Keys, weights and values of ${plural(now.count, "token")}, ${place()}`,
  );
  if (!$("numbers").hidden) table(now);
}

const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

function grid(head, rows) {
  // the content of a table; the first cell of each row is its header
  const cells = (row) =>
    row.map((text, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, String(text)));
  return [
    make(
      "thead",
      {},
      make("tr", {}, ...head.map((textContent) => make("th", { scope: "col", textContent }))),
    ),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))),
  ];
}

function table(now) {
  // the numbers in the picture
  const rows = chat.lane.ids
    .slice(0, now.count)
    .map((id, s) => [s, name(id), figures(now.scores[s]), figures(now.weights[s])]);
  const textContent = `Token ${chat.position}: its query and each cached key, ${place()}`;
  $("numbers").replaceChildren(
    make(
      "table",
      {},
      make("caption", { textContent }),
      ...grid(["position", "token", "q · k / √D", "weight"], rows),
    ),
  );
}

const redraw = () => {
  chat.position < 0 ? preview() : (chat.dirty = true);
};

function preview() {
  // the tokens that are about to be read, without columns
  if (chat.messages.length) return;
  const ids = tokenizer.encode(tokenizer.render([{ role: "user", content: $("sentence").value }]));
  stage.draw(null, labels(ids), 0, 1);
  triangles.draw([]);
  $("readout").textContent =
    `${plural(ids.length, "token")}. The prefill will read all of them at once.`;
}

function warmUp() {
  // run the loops once, so that the browser compiles them
  const lane = plain(model);
  lane.begin(tokenizer.encode($("sentence").value).slice(0, 8));
  for (let n = 0; n < 3; n++) lane.begin([largest(lane.go())]);
  times.warm = performance.now();
}

// --- input ---------------------------------------------------------------------------------------

function go(by) {
  // go one token back or forward; after the newest token, compute the next one
  if (chat.position < 0) return;
  const last = chat.lane.ids.length - 1;
  pause(true);
  chat.rest = null;
  if (by > 0 && chat.position === last && chat.running) return void advance();
  chat.position = Math.min(last, Math.max(0, chat.position + by));
  chat.since = 0;
  chat.dirty = true;
}

function pause(stop) {
  chat.playing = !stop;
  $("play").textContent = stop ? "Go on" : "Pause";
  if (!stop) chat.position = chat.lane.ids.length - 1;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const sentence = $("sentence").value.trim();
  if (!sentence) return;
  if (chat.running) finish();
  pause(false);
  say(sentence);
  $("sentence").select();
});
$("clear").addEventListener("click", () => {
  newChat();
  preview();
  counters();
  $("words").textContent = "The cache is empty again: the model has forgotten the conversation.";
  $("clear").hidden = true;
  $("play").disabled = true;
  chat.dirty = true;
  $("sentence").focus();
});
$("play").addEventListener("click", () => pause(chat.playing));
$("back").addEventListener("click", () => go(-1));
$("on").addEventListener("click", () => go(1));
$("stage").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) go(by);
  else if (event.key === " " && chat.running) pause(chat.playing);
  else return;
  event.preventDefault();
});
$("stage").addEventListener("pointermove", (event) => {
  const now = look();
  const s = now ? stage.column(event, chat.lane.ids.length) : -1;
  if (s < 0 || s >= now.count) return;
  put(
    $("readout"),
    `${name(chat.lane.ids[s])}, position ${s}: score ${figures(now.scores[s], 3)}, ` +
      `weight ${percent(now.weights[s])}`,
  );
});
$("stage").addEventListener("pointerleave", () => {
  chat.dirty = true;
});
$("stage").addEventListener("click", (event) => {
  const s = chat.position < 0 ? -1 : stage.column(event, chat.lane.ids.length);
  if (s >= 0) go(s - chat.position);
});
$("twin").addEventListener("click", () => {
  $("numbers").hidden = !$("numbers").hidden;
  $("twin").setAttribute("aria-expanded", String(!$("numbers").hidden));
  chat.dirty = true;
});
for (const [id, many, chosen] of [
  ["layer", model.layers.length, DATA.look.layer],
  ["head", model.shape.heads, DATA.look.head],
]) {
  $(id).append(...span(many).map((n) => make("option", { value: n, textContent: n })));
  $(id).value = chosen;
  $(id).addEventListener("change", () => {
    stage.repaint();
    chat.dirty = true;
  });
}
addEventListener("resize", () => {
  stage.fit();
  triangles.fit();
  redraw();
});
const recolour = () => {
  inks.clear();
  stage.repaint();
  redraw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("message", ({ source, data }) => {
  // the page around this frame sends the theme that its reader chose
  if (source !== parent || !["dark", "light"].includes(data?.theme)) return;
  wear(data.theme);
  recolour();
});

newChat();
$("parameters").textContent = count(DATA.parameters);
$("speed").textContent = `Loaded in ${Math.round(times.ready)} ms.`;
if (parent === window) {
  $("sentence").focus();
  $("sentence").select();
} // in a frame the page around it has the focus
$("sentence").addEventListener("input", preview);
preview();
requestAnimationFrame(frame);
setTimeout(warmUp);
