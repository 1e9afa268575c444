// The right side: what a snapshot of the engine looks like. Pictures are canvases; each has its numbers as a table.

const WHOSE = { tab: "this tab", key: "another client", other: "another key" };
const REASONS = { stop: "Finished", length: "Finished at its limit of tokens", cancelled: "Stopped", error: "Failed" };
const HISTORY = 60;

class Drawing extends Figure { // `draw(canvas, room)`, once per snapshot and at a new width
  constructor(host, title, { table, draw, keys = [] }) {
    super(host, title, table);
    this.paint = draw;
    this.canvas = make("canvas", { role: "img" });
    this.canvas.setAttribute("aria-label", title);
    this.keys = make("p", { className: "key", "aria-hidden": "true" });
    this.looks = keys;
    this.body.before(this.readout);
    this.readout.removeAttribute("role"); // it changes five times a second
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
    this.keys.replaceChildren(...this.looks.map(([name, look]) => make("span", {}, swatch(look), name)));
    this.fill();
    this.draw();
  }
}

const cache = {
  now: null, turn: null, last: "", history: [],

  build() {
    const host = $("figures");
    this.turnFigure = new Drawing(host, "Your newest turn, token by token", {
      table: () => this.turnTable(),
      draw: (canvas, room) => this.turn ? drawTokens(canvas, this.turn, this.now.pool.page_size, room) : sized(canvas, 0, 0),
      keys: [["reused", PARTS.reused], ["computed", PARTS.computed], ["answer, one per step", PARTS.answer], ["not in the cache", PARTS.absent]],
    });
    this.poolFigure = new Drawing(host, "Pages of the pool", {
      table: () => this.poolTable(), draw: (canvas, room) => drawPool(canvas, this.now, room),
      keys: [["a letter: a request, yours framed", { fill: "--one", text: "A", frame: "--ink" }],
        ["several requests", ownerLook(SHARED)], ["kept for reuse", ownerLook(KEPT_PAGES)], ["free", ownerLook(FREE)]],
    });
    this.clients = make("ul", { className: "clients" });
    this.clientFigure = new Figure(host, "Requests", () => this.clientTable());
    this.clientFigure.body.append(this.clients);
    this.clientFigure.readout.removeAttribute("role");
    this.clientFigure.body.before(this.clientFigure.readout);
    this.stepFigure = new Drawing(host, "Tokens a step", {
      table: () => this.stepTable(), draw: (canvas, room) => this.drawSteps(canvas, room),
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
    this.turn = taken.requests.findLast(({ whose }) => whose === "tab") ?? taken.ended[0] ?? null;
    this.note(before, taken);
    $("version").textContent = taken.version, $("model").textContent = taken.model;
    document.title = `${taken.model} · nanokv serve`;
    this.turnFigure.refresh(this.turnText());
    this.poolFigure.refresh(this.poolText());
    this.showClients();
    this.showFacts();
    this.stepFigure.refresh(this.stepText());
  },

  note(before, { engine, requests }) { // what happened since the snapshot before
    if (!before || engine.steps < before.engine.steps) this.last = "", this.history = []; // a new server counts anew
    else if (engine.steps > before.engine.steps) {
      const [steps, prefill, decode] = ["steps", "prefill_tokens", "decode_tokens"].map((name) => engine[name] - before.engine[name]);
      this.history = [...this.history, { until: engine.steps, steps, prefill: prefill / steps, decode: decode / steps }].slice(-HISTORY);
    }
    const earlier = new Map(before?.requests.map(({ id, preemptions }) => [id, preemptions]));
    const hit = requests.filter(({ id, preemptions }) => preemptions > (earlier.get(id) ?? 0));
    if (!hit.length) return;
    this.last = hit.map(({ id, whose }) => `${letterOf(id)} (${WHOSE[whose]})`).join(", ");
    if (hit.some(({ whose }) => whose === "tab")) say("The pool is full. Your request gave its pages back and waits in the queue.");
  },

  redraw() { if (this.now) this.show(this.now); },

  // --- the newest turn ----------------------------------------------------------------------------------------------

  turnText() {
    const { turn, now: { pool } } = this;
    if (!turn) return "Nothing was asked since this page was loaded.";
    const words = `${count(turn.reused)} of ${plural(turn.prompt, "prompt token")} reused, ${count(turn.prefilled)} computed, ${count(turn.generated)} answered.`;
    if (turn.reason) return `${words} ${this.leftText(turn)}`;
    if (turn.state === "queued") return `${words} ${turn.preemptions ? "Preempted: its pages are given back, and it waits in the queue." : "It waits in the queue."}`;
    return `${words} It holds ${count(turn.held)} tokens in ${plural(turn.pages, "page")}, ${bytes(turn.pages * pool.bytes_per_page)}.`;
  },

  leftText({ reason, kept }) {
    const { page_size, bytes_per_page } = this.now.pool, pages = kept / page_size;
    const left = kept ? `${plural(pages, "full page")} of it (${count(kept)} tokens, ${bytes(pages * bytes_per_page)}) stay for reuse by the next turn; the rest is free.`
      : "None of its pages is kept.";
    return `${REASONS[reason] ?? "Ended"}: its place is free. ${left}`;
  },

  turnTable() {
    const turn = this.turn ?? { prompt: 0, reused: 0, prefilled: 0, generated: 0 };
    const rows = [["prompt, reused", turn.reused], ["prompt, computed", turn.prefilled],
      ["prompt, not computed", Math.max(0, turn.prompt - turn.reused - turn.prefilled)], ["answer", turn.generated],
      turn.reason ? ["kept for reuse", turn.kept] : ["in the cache", turn.held ?? 0]];
    return { caption: "Tokens of your newest turn", head: ["part", "tokens"], rows: rows.map(([name, n]) => [name, count(n)]) };
  },

  // --- the pool -----------------------------------------------------------------------------------------------------

  poolText() {
    const { pages, free, kept, page_size, bytes_per_page, cell } = this.now.pool, { preemptions } = this.now.engine;
    const words = `${plural(pages, "page")} of ${plural(page_size, "token")}${bytes_per_page ? `, ${bytes(pages * bytes_per_page)}` : ""}: ` +
      `${count(pages - free - kept)} held by requests, ${count(kept)} kept for reuse, ${count(free)} free.`;
    const many = cell > 1 ? ` A cell is ${cell} pages.` : "";
    const full = preemptions ? ` ${plural(preemptions, "preemption")} so far${this.last ? `, the last of ${this.last}` : ""}: the pool was full.` : "";
    return words + many + full;
  },

  ownerName(owner) {
    const names = { [FREE]: "free", [KEPT_PAGES]: "kept for reuse", [SHARED]: "several requests" };
    const request = this.now.requests[owner];
    return names[owner] ?? `${letterOf(request.id)}, ${WHOSE[request.whose]}`;
  },

  poolTable() {
    const { cell, pages } = this.now.pool;
    let first = 0;
    const rows = this.now.cells.map(([owner, n]) => {
      const from = first * cell, until = Math.min(pages, (first += n) * cell);
      return [until - from > 1 ? `${count(from)} to ${count(until - 1)}` : count(from), count(until - from), this.ownerName(owner)];
    });
    return { caption: "Pages of the pool, by their numbers", head: ["pages", "how many", "held by"], rows };
  },

  // --- requests -----------------------------------------------------------------------------------------------------

  requestText({ whose, state, preemptions, pages, ...request }) {
    const tokens = whose === "other" || state === "queued" ? plural(request.tokens, "token")
      : `${count(request.reused)} reused + ${count(request.prefilled)} computed + ${count(request.generated)} answered`;
    const again = preemptions ? `, preempted ${preemptions}×` : "";
    return `${WHOSE[whose]} · ${state}${again} · ${tokens} · ${plural(pages, "page")}`;
  },

  showClients() {
    const { requests, engine } = this.now, most = Math.max(1, ...requests.map(({ tokens }) => tokens));
    const hidden = engine.running + engine.waiting - requests.length;
    this.clientFigure.readout.textContent = `${count(engine.running)} running, ${count(engine.waiting)} in the queue` +
      (hidden > 0 ? `, of which ${count(hidden)} are not listed.` : ".");
    this.clients.replaceChildren(...requests.map((request, n) => {
      const parts = request.whose === "other" || request.state === "queued" ? [["held", request.held]]
        : [["reused", request.reused], ["new", request.prefilled], ["answer", request.generated]];
      const rail = make("span", { className: "rail", "aria-hidden": "true" }, ...parts.map(([name, tokens]) => {
        const part = make("span", { className: `part-${name}` });
        part.style.width = `${(100 * tokens) / most}%`;
        return part;
      }));
      return make("li", {}, swatch(ownerLook(n, requests)), make("span", { textContent: this.requestText(request) }), rail);
    }));
    this.clientFigure.fill();
  },

  clientTable() {
    const rows = this.now.requests.map(({ id, whose, state, tokens, held, pages, preemptions, reused = "–" }) =>
      [letterOf(id), WHOSE[whose], state, count(tokens), count(held), reused, pages, preemptions]);
    return { caption: "Requests", head: ["request", "of", "state", "tokens", "in the cache", "reused", "pages", "preempted"], rows };
  },

  // --- the engine ---------------------------------------------------------------------------------------------------

  stepText() {
    const last = this.history.at(-1);
    if (!last) return "No step since this page was opened.";
    return `${figures(last.prefill + last.decode, 3)} tokens a step lately: ${figures(last.prefill, 3)} prefill, ${figures(last.decode, 3)} decode.`;
  },

  showFacts() {
    const { running, waiting, steps, reused_tokens, preemptions } = this.now.engine;
    const facts = { running, "in the queue": waiting, steps, "tokens reused": reused_tokens, preemptions };
    this.facts.replaceChildren(...Object.entries(facts).map(([name, n]) =>
      make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: count(n) }))));
  },

  drawSteps(canvas, room) {
    const tall = 64, wide = Math.max(2, Math.floor(room / HISTORY)), pen = canvas.getContext("2d");
    const most = Math.max(8, ...this.history.map(({ prefill, decode }) => prefill + decode));
    sized(canvas, room, tall);
    this.history.forEach(({ prefill, decode }, n) => {
      const heights = [decode, prefill].map((tokens) => (tokens && Math.max(2, (tokens * (tall - 2)) / most)));
      box(pen, n * wide, tall - heights[0], wide - 1, heights[0], PARTS.answer);
      box(pen, n * wide, tall - heights[0] - heights[1], wide - 1, heights[1], PARTS.computed);
    });
    pen.fillStyle = colour("--rule"), pen.fillRect(0, tall - 1, room, 1);
    pen.fillStyle = colour("--soft"), pen.font = LETTERS, pen.textAlign = "right", pen.textBaseline = "top";
    pen.fillText(count(Math.round(most)), room - 2, 2);
  },

  stepTable() {
    const rows = this.history.map(({ until, steps, prefill, decode }) => [`${count(until - steps + 1)} to ${count(until)}`, figures(prefill, 3), figures(decode, 3)]);
    return { caption: "Tokens a step, mean over the steps between two snapshots", head: ["steps", "prefill", "decode"], rows };
  },
};
