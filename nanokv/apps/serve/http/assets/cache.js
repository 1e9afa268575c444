// The right side of the page: a snapshot of the engine. Each figure is a canvas with a table of its
// numbers.

const WHOSE = { tab: "this tab", key: "another client", other: "another key" };
const REASONS = {
  stop: "Finished",
  length: "Finished at its token limit",
  cancelled: "Stopped",
  error: "Failed",
};
const HISTORY = 60; // snapshots in the figure of steps

// A figure that calls `draw(canvas, room)` for every snapshot and after every change of its width.
class Drawing extends Figure {
  constructor(host, title, { table, draw, keys = [] }) {
    super(host, title, table);
    this.paint = draw;
    this.canvas = make("canvas", { role: "img" });
    this.canvas.setAttribute("aria-label", title);
    this.keys = make("p", { className: "key", "aria-hidden": "true" });
    this.looks = keys;
    this.body.before(this.readout);
    this.readout.removeAttribute("role"); // not announced: it changes five times a second
    this.body.append(this.canvas, this.keys);
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  draw() {
    if (!cache.now || !this.body.clientWidth) return;
    this.paint(this.canvas, this.body.clientWidth);
  }

  refresh(text) {
    this.readout.textContent = text;
    this.canvas.setAttribute("aria-label", `${this.title.textContent}: ${text}`);
    const keys = this.looks.map(([name, look]) => make("span", {}, swatch(look), name));
    this.keys.replaceChildren(...keys);
    this.fill();
    this.draw();
  }
}

const cache = {
  now: null, // the newest snapshot
  turn: null, // this tab's newest request
  last: "", // the requests that were preempted last
  history: [],

  build() {
    const host = $("figures");
    this.buildTurn(host);
    this.buildPool(host);
    this.buildClients(host);
    this.buildSteps(host);
  },

  buildTurn(host) {
    this.turnFigure = new Drawing(host, "Your newest turn, token by token", {
      table: () => this.turnTable(),
      draw: (canvas, room) => {
        if (this.turn) drawTokens(canvas, this.turn, this.now.pool.page_size, room);
        else sized(canvas, 0, 0);
      },
      keys: [
        ["reused", PARTS.reused],
        ["computed", PARTS.computed],
        ["answer, one per step", PARTS.answer],
        ["not in the cache", PARTS.absent],
      ],
    });
  },

  buildPool(host) {
    this.poolFigure = new Drawing(host, "Pages of the pool", {
      table: () => this.poolTable(),
      draw: (canvas, room) => drawPool(canvas, this.now, room),
      keys: [
        ["a letter: a request, yours framed", { fill: "--one", text: "A", frame: "--ink" }],
        ["several requests", ownerLook(SHARED)],
        ["kept for reuse", ownerLook(KEPT_PAGES)],
        ["free", ownerLook(FREE)],
      ],
    });
  },

  buildClients(host) {
    this.clients = make("ul", { className: "clients" });
    this.clientFigure = new Figure(host, "Requests", () => this.clientTable());
    this.clientFigure.body.append(this.clients);
    this.clientFigure.readout.removeAttribute("role");
    this.clientFigure.body.before(this.clientFigure.readout);
  },

  buildSteps(host) {
    this.stepFigure = new Drawing(host, "Tokens per step", {
      table: () => this.stepTable(),
      draw: (canvas, room) => this.drawSteps(canvas, room),
      keys: [["prefill", PARTS.computed], ["decode", PARTS.answer]],
    });
    this.facts = make("dl", { className: "facts" });
    this.stepFigure.readout.after(this.facts);
  },

  show(taken) {
    const before = this.now;
    this.now = taken;
    $("figures").hidden = false;
    nameAll(taken.requests);
    const running = taken.requests.findLast(({ whose }) => whose === "tab");
    this.turn = running ?? taken.ended[0] ?? null;
    this.note(before, taken);
    $("version").textContent = taken.version;
    $("model").textContent = taken.model;
    document.title = `${taken.model} · nanokv serve`;
    this.turnFigure.refresh(this.turnText());
    this.poolFigure.refresh(this.poolText());
    this.showClients();
    this.showFacts();
    this.stepFigure.refresh(this.stepText());
  },

  // Records what changed since the previous snapshot: steps, and preempted requests.
  note(before, { engine, requests }) {
    if (!before || engine.steps < before.engine.steps) { // a new server counts from 0
      this.last = "";
      this.history = [];
    } else if (engine.steps > before.engine.steps) {
      const steps = engine.steps - before.engine.steps;
      const prefill = (engine.prefill_tokens - before.engine.prefill_tokens) / steps;
      const decode = (engine.decode_tokens - before.engine.decode_tokens) / steps;
      const added = [...this.history, { until: engine.steps, steps, prefill, decode }];
      this.history = added.slice(-HISTORY);
    }
    const earlier = new Map(before?.requests.map(({ id, preemptions }) => [id, preemptions]));
    const hit = requests.filter(({ id, preemptions }) => preemptions > (earlier.get(id) ?? 0));
    if (!hit.length) return;
    this.last = hit.map(({ id, whose }) => `${letterOf(id)} (${WHOSE[whose]})`).join(", ");
    if (hit.some(({ whose }) => whose === "tab")) {
      say("The pool is full. Your request gave its pages back and waits in the queue.");
    }
  },

  redraw() {
    if (this.now) this.show(this.now);
  },

  // --- the newest turn ---------------------------------------------------------------------------

  turnText() {
    const { turn, now: { pool } } = this;
    if (!turn) return "No request since this page was loaded.";
    const words =
      `${count(turn.reused)} of ${plural(turn.prompt, "prompt token")} reused, ` +
      `${count(turn.prefilled)} computed, ${count(turn.generated)} generated.`;
    if (turn.reason) return `${words} ${this.leftText(turn)}`;
    if (turn.state === "queued" && turn.preemptions) {
      return `${words} Preempted: its pages are given back, and it waits in the queue.`;
    }
    if (turn.state === "queued") return `${words} It waits in the queue.`;
    const size = bytes(turn.pages * pool.bytes_per_page);
    const pages = plural(turn.pages, "page");
    return `${words} It holds ${count(turn.held)} tokens in ${pages}, ${size}.`;
  },

  leftText({ reason, kept }) {
    const { page_size, bytes_per_page } = this.now.pool;
    const pages = kept / page_size;
    let left = "None of its pages is kept.";
    if (kept) {
      left =
        `${plural(pages, "full page")} of it (${count(kept)} tokens, ` +
        `${bytes(pages * bytes_per_page)}) stay for reuse by the next turn; the rest is free.`;
    }
    return `${REASONS[reason] ?? "Ended"}: its place is free. ${left}`;
  },

  turnTable() {
    const turn = this.turn ?? { prompt: 0, reused: 0, prefilled: 0, generated: 0 };
    const absent = Math.max(0, turn.prompt - turn.reused - turn.prefilled);
    const rows = [
      ["prompt, reused", turn.reused],
      ["prompt, computed", turn.prefilled],
      ["prompt, not computed", absent],
      ["answer", turn.generated],
      turn.reason ? ["kept for reuse", turn.kept] : ["in the cache", turn.held ?? 0],
    ];
    return {
      caption: "Tokens of your newest turn",
      head: ["part", "tokens"],
      rows: rows.map(([name, n]) => [name, count(n)]),
    };
  },

  // --- the pool ----------------------------------------------------------------------------------

  poolText() {
    const { pages, free, kept, page_size, bytes_per_page, cell, states } = this.now.pool;
    const { preemptions } = this.now.engine;
    let text = `${plural(pages, "page")} of ${plural(page_size, "token")}`;
    if (bytes_per_page) text += `, ${bytes(pages * bytes_per_page)}`;
    text += `: ${count(pages - free - kept)} held by requests, `;
    text += `${count(kept)} kept for reuse, ${count(free)} free.`;
    if (cell > 1) text += ` A cell is ${cell} pages.`;
    if (states.most) {
      text += ` ${plural(states.held, "snapshot")} of the recurrent layers (at most ` +
        `${count(states.most)}): ${bytes(states.bytes)}, as much as ` +
        `${plural(states.as_tokens, "token")} of keys and values; ` +
        `${plural(states.hits, "prompt")} resumed at one.`;
    }
    if (preemptions) {
      const last = this.last ? `, most recently of ${this.last}` : "";
      text += ` ${plural(preemptions, "preemption")} so far${last}: the pool was full.`;
    }
    return text;
  },

  ownerName(owner) {
    const names = { [FREE]: "free", [KEPT_PAGES]: "kept for reuse", [SHARED]: "several requests" };
    if (owner in names) return names[owner];
    const request = this.now.requests[owner];
    return `${letterOf(request.id)}, ${WHOSE[request.whose]}`;
  },

  poolTable() {
    const { cell, pages } = this.now.pool;
    const rows = [];
    let first = 0;
    for (const [owner, n] of this.now.cells) {
      const from = first * cell;
      first += n;
      const until = Math.min(pages, first * cell);
      const many = until - from > 1;
      const range = many ? `${count(from)} to ${count(until - 1)}` : count(from);
      rows.push([range, count(until - from), this.ownerName(owner)]);
    }
    return {
      caption: "Pages of the pool, by their numbers",
      head: ["pages", "how many", "held by"],
      rows,
    };
  },

  // --- requests ----------------------------------------------------------------------------------

  requestText({ whose, state, preemptions, pages, ...request }) {
    let tokens = plural(request.tokens, "token");
    if (whose !== "other" && state !== "queued") {
      tokens =
        `${count(request.reused)} reused + ${count(request.prefilled)} computed + ` +
        `${count(request.generated)} generated`;
    }
    const again = preemptions ? `, preempted ${preemptions}×` : "";
    return `${WHOSE[whose]} · ${state}${again} · ${tokens} · ${plural(pages, "page")}`;
  },

  showClients() {
    const { requests, engine } = this.now;
    const most = Math.max(1, ...requests.map(({ tokens }) => tokens));
    const hidden = engine.running + engine.waiting - requests.length;
    const end = hidden > 0 ? `, of which ${count(hidden)} are not listed.` : ".";
    this.clientFigure.readout.textContent =
      `${count(engine.running)} running, ${count(engine.waiting)} in the queue${end}` +
      this.keyText();
    this.clients.replaceChildren(...requests.map((request, n) => {
      const text = make("span", { textContent: this.requestText(request) });
      return make("li", {}, swatch(ownerLook(n, requests)), text, this.rail(request, most));
    }));
    this.clientFigure.fill();
  },

  // The places and tokens of this page's API key; nothing on a server without keys.
  keyText() {
    if (!key) return "";
    const { places, share, prompt_tokens, generated_tokens } = this.now.key;
    return (
      ` Your key has ${count(places)} of ${plural(share, "place")}; so far ` +
      `${plural(prompt_tokens, "prompt token")} and ` +
      `${plural(generated_tokens, "answer token")} were served to it.`
    );
  },

  // A bar of a request's tokens; `most` tokens are the full width.
  rail(request, most) {
    let parts = [
      ["reused", request.reused],
      ["new", request.prefilled],
      ["answer", request.generated],
    ];
    if (request.whose === "other" || request.state === "queued") parts = [["held", request.held]];
    const bars = parts.map(([name, tokens]) => {
      const bar = make("span", { className: `part-${name}` });
      bar.style.width = `${(100 * tokens) / most}%`;
      return bar;
    });
    return make("span", { className: "rail", "aria-hidden": "true" }, ...bars);
  },

  clientTable() {
    const rows = this.now.requests.map((request) => [
      letterOf(request.id),
      WHOSE[request.whose],
      request.state,
      count(request.tokens),
      count(request.held),
      request.reused ?? "–",
      request.pages,
      request.preemptions,
    ]);
    return {
      caption: "Requests",
      head: [
        "request", "of", "state", "tokens", "in the cache", "reused", "pages", "preempted",
      ],
      rows,
    };
  },

  // --- the engine --------------------------------------------------------------------------------

  stepText() {
    const last = this.history.at(-1);
    if (!last) return "No step since this page was opened.";
    const total = figures(last.prefill + last.decode, 3);
    const prefill = figures(last.prefill, 3);
    const decode = figures(last.decode, 3);
    return `${total} tokens per recent step: ${prefill} prefill, ${decode} decode.`;
  },

  showFacts() {
    const { running, waiting, steps, reused_tokens, preemptions } = this.now.engine;
    const facts = {
      running,
      "in the queue": waiting,
      steps,
      "tokens reused": reused_tokens,
      preemptions,
    };
    const rows = Object.entries(facts).map(([name, n]) => {
      const term = make("dt", { textContent: name });
      return make("div", {}, term, make("dd", { textContent: count(n) }));
    });
    this.facts.replaceChildren(...rows);
  },

  drawSteps(canvas, room) {
    const tall = 64;
    const wide = Math.max(2, Math.floor(room / HISTORY));
    const pen = canvas.getContext("2d");
    const most = Math.max(8, ...this.history.map(({ prefill, decode }) => prefill + decode));
    const height = (tokens) => tokens && Math.max(2, (tokens * (tall - 2)) / most);
    sized(canvas, room, tall);
    this.history.forEach(({ prefill, decode }, n) => {
      const lower = height(decode);
      const upper = height(prefill);
      box(pen, n * wide, tall - lower, wide - 1, lower, PARTS.answer);
      box(pen, n * wide, tall - lower - upper, wide - 1, upper, PARTS.computed);
    });
    pen.fillStyle = colour("--rule");
    pen.fillRect(0, tall - 1, room, 1);
    pen.fillStyle = colour("--soft");
    pen.font = LETTERS;
    pen.textAlign = "right";
    pen.textBaseline = "top";
    pen.fillText(count(Math.round(most)), room - 2, 2);
  },

  stepTable() {
    const rows = this.history.map(({ until, steps, prefill, decode }) => [
      `${count(until - steps + 1)} to ${count(until)}`,
      figures(prefill, 3),
      figures(decode, 3),
    ]);
    return {
      caption: "Tokens per step, mean over the steps between two snapshots",
      head: ["steps", "prefill", "decode"],
      rows,
    };
  },
};
