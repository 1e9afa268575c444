// The left side: a conversation over POST /v1/chat/completions.
//
// A model's text becomes text nodes, never HTML.

const NAMES = { user: "You", assistant: "Answer" };
const ENDS = {
  stopped: "stopped by you",
  failed: "not complete",
  cut: "cut off when the page was left",
};

const chat = {
  turns: recall("turns", []), // {role, content, thoughts, state, facts, error}
  shown: [], // per turn, the elements that change
  asking: null, // an AbortController while an answer arrives

  build() {
    for (const turn of this.turns) {
      if (turn.state === "busy") turn.state = "cut";
    }
    this.turns.forEach((turn) => this.add(turn));
    this.settle();
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.asking) this.stop();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("retry").addEventListener("click", () => this.retry());
    $("new").addEventListener("click", () => this.clear());
    addEventListener("pagehide", () => {
      this.left = true;
      remember("turns", this.turns);
    });
    addEventListener("pageshow", () => { this.left = false; });
  },

  // --- the user's actions ------------------------------------------------------------------------

  send() {
    const text = $("text").value.trim();
    if (!text) return say("The message is empty.");
    if (this.asking) return say("An answer is still coming. Escape stops it.");
    $("text").value = "";
    this.put({ role: "user", content: text });
    this.answer();
  },

  stop() {
    if (!this.asking) return;
    this.asking.abort();
    $("text").focus();
  },

  // Replace the newest answer by another one.
  retry() {
    if (this.asking || this.turns.at(-1)?.role !== "assistant") return;
    this.turns.pop();
    this.shown.pop().item.remove();
    $("text").focus();
    this.answer();
  },

  clear() {
    this.asking?.abort();
    this.turns = [];
    this.shown = [];
    $("turns").replaceChildren();
    this.settle();
    say("New conversation.");
    $("text").focus();
  },

  // --- an answer ---------------------------------------------------------------------------------

  // The messages of a request, without empty answers.
  messages() {
    return this.turns
      .filter(({ role, content }) => role === "user" || content)
      .map(({ role, content }) => ({ role, content }));
  },

  async answer() {
    const messages = this.messages();
    const asking = new AbortController();
    const turn = this.put({ role: "assistant", content: "", thoughts: "", state: "busy" });
    this.asking = asking;
    this.settle();
    try {
      await this.stream(turn, messages, asking.signal);
      turn.state = "done";
    } catch (error) {
      if (this.left) return; // the browser ended the request; the stored turn is still "busy"
      turn.state = asking.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = this.failure(error);
    }
    if (this.asking === asking) this.asking = null;
    this.paint(turn);
    this.settle();
    if (this.turns.includes(turn)) say(this.ending(turn));
  },

  failure(error) {
    if (error instanceof Refusal) return error.message;
    return "The server cannot be reached; the answer is incomplete.";
  },

  async stream(turn, messages, signal) {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      body: JSON.stringify({ messages, stream: true, stream_options: { include_usage: true } }),
      signal,
      headers: { "Content-Type": "application/json" },
    });
    for await (const event of events(response)) {
      if (event === "[DONE]") return;
      const { error, choices: [choice] = [], usage } = JSON.parse(event);
      if (error) throw new Refusal(0, { error });
      if (usage) turn.usage = usage;
      if (choice?.finish_reason) turn.reason = choice.finish_reason;
      turn.content += choice?.delta.content ?? "";
      turn.thoughts += choice?.delta.reasoning_content ?? "";
      this.later(turn);
    }
    throw new Error("the stream ended early");
  },

  ending({ state, error, usage }) {
    if (state === "failed") return `Error: ${error}`;
    if (state === "stopped") return "Stopped. The text so far is kept.";
    if (!usage) return "Answer complete.";
    return `Answer complete, ${plural(usage.completion_tokens, "token")}.`;
  },

  // --- on the page -------------------------------------------------------------------------------

  put(turn) {
    this.turns.push(turn);
    this.add(turn);
    return turn;
  },

  add(turn) {
    const who = make("p", { className: "who", textContent: NAMES[turn.role] });
    const summary = make("summary");
    const thoughts = make("p", { className: "words" });
    const fold = make("details", { hidden: true }, summary, thoughts);
    const words = make("p", { className: "words" });
    const end = make("p", { className: "end" });
    const item = make("li", { className: `turn ${turn.role}` }, who, fold, words, end);
    this.shown.push({ turn, item, words, end, fold, summary, thoughts });
    $("turns").append(item);
    this.paint(turn);
    $("turns").scrollTop = $("turns").scrollHeight;
  },

  // Paint at most once per frame, however many tokens arrive.
  later(turn) {
    if (this.painting) return;
    this.painting = requestAnimationFrame(() => {
      this.painting = null;
      this.paint(turn);
    });
  },

  paint(turn) {
    const found = this.shown.find((one) => one.turn === turn);
    if (!found) return; // its conversation was cleared
    const list = $("turns");
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const busy = turn.state === "busy";
    found.item.classList.toggle("busy", busy);
    found.item.setAttribute("aria-busy", String(busy));
    found.words.textContent = turn.content;
    found.fold.hidden = !turn.thoughts;
    found.thoughts.textContent = turn.thoughts ?? "";
    found.summary.textContent = busy && !turn.content ? "Thinking …" : "Thoughts";
    found.end.replaceChildren(...this.endText(turn));
    if (atEnd) list.scrollTop = list.scrollHeight;
  },

  endText({ state, error, usage, reason }) {
    const parts = [];
    if (ENDS[state]) parts.push(ENDS[state]);
    if (reason === "length") parts.push("ended at its token limit");
    if (usage) {
      const reused = count(usage.prompt_tokens_details.cached_tokens);
      parts.push(
        `${reused} of ${plural(usage.prompt_tokens, "prompt token")} reused, ` +
        `${plural(usage.completion_tokens, "token")} generated`,
      );
    }
    const said = parts.join(" · ");
    if (!error) return [said];
    const wrong = make("span", { className: "wrong", textContent: `Error: ${error}` });
    return said ? [wrong, ` · ${said}`] : [wrong];
  },

  // Show the actions that are possible now, and store the conversation.
  settle() {
    const asking = Boolean(this.asking);
    $("stop").hidden = !asking;
    $("retry").hidden = asking || this.turns.at(-1)?.role !== "assistant";
    $("send").setAttribute("aria-disabled", String(asking));
    $("empty").hidden = this.turns.length > 0;
    remember("turns", this.turns);
  },
};
