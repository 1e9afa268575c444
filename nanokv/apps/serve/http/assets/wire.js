// Talking to the server: the key, events out of a response, and the stream of snapshots with its reconnection.

const $ = (id) => document.getElementById(id);
const TAB = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const KEPT = "nanokv-serve"; // of this tab alone, and gone with it
const SILENT_MS = 15000; // the server says something every 5 s, if only a comment
const BACK_OFF = [500, 1000, 2000, 4000, 8000];

function recall(name, otherwise) { // a browser that keeps nothing starts afresh
  try { return JSON.parse(sessionStorage.getItem(`${KEPT}-${name}`)) ?? otherwise; } catch { return otherwise; }
}

function remember(name, value) {
  try { sessionStorage.setItem(`${KEPT}-${name}`, JSON.stringify(value)); } catch { /* nothing is kept */ }
}

let key = recall("key", "");

function headers() {
  const found = { "X-Nanokv-Tab": TAB };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

class Refusal extends Error { // what the server says in OpenAI's words
  constructor(status, body) {
    const error = body?.error ?? {};
    super([error.message ?? `status ${status}`, body?.hint].filter(Boolean).join(" · "));
    this.status = status, this.code = error.code;
  }
}

async function ask(path, options = {}) { // a response that is none of the refusals
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers }, cache: "no-store" });
  if (response.ok) return response;
  const refusal = new Refusal(response.status, await response.json().catch(() => null));
  if (refusal.code === "invalid_api_key") askKey();
  throw refusal;
}

async function* events(response, heard = () => {}) { // the text after each "data: "
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      heard();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally { reader.cancel().catch(() => {}); }
}

// --- the key --------------------------------------------------------------------------------------------------------

let keyGiven = () => {};

function askKey() {
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
  if (key) say("The server does not know this API key.");
}

function useKey(event) {
  event.preventDefault();
  const given = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) return say("A key is made of visible ASCII characters without blanks.");
  key = given;
  remember("key", key);
  $("key").value = "", $("key-form").hidden = true;
  $("text").focus();
  keyGiven();
}

// --- what is announced ----------------------------------------------------------------------------------------------

function say(text) { // to screen readers; the same words twice are two messages
  $("said").textContent = $("said").textContent === text ? `${text}\u00a0` : text;
}

function connection(kind, text) {
  $("connection").className = `state ${kind}`;
  $("connection").textContent = text;
}

// --- snapshots ------------------------------------------------------------------------------------------------------

const live = {
  failures: 0, stream: null, lost: false,

  async run() { // for as long as the page is there
    for (;;) {
      if (document.hidden) await this.shown(); // a hidden page holds none of the browser's six connections
      const before = key;
      const trouble = await this.watch().catch((error) => error);
      if (document.hidden) continue;
      if (trouble?.code === "invalid_api_key") await this.waitForKey(before);
      else await this.wait(trouble);
    }
  },

  async watch() { // until the stream ends; returns why, where the server has said it
    this.stream = new AbortController();
    let timer = null, silent = false;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => { silent = true; this.stream.abort(); }, SILENT_MS);
    };
    try {
      heard();
      const response = await ask("/live", { signal: this.stream.signal });
      for await (const event of events(response, heard)) {
        const found = JSON.parse(event);
        if (found.error) return new Refusal(0, found);
        this.opened();
        cache.show(found);
      }
    } catch (error) {
      if (silent) return new Error("the server says nothing");
      throw error;
    } finally { clearTimeout(timer); }
  },

  opened() {
    this.failures = 0;
    connection("open", "live");
    $("stale").hidden = true;
    if (this.lost) say("Connected again.");
    this.lost = false;
  },

  async wait(trouble) {
    const ms = BACK_OFF[Math.min(this.failures++, BACK_OFF.length - 1)] * (0.8 + 0.4 * Math.random());
    const reason = trouble instanceof Refusal ? trouble.message : "The server cannot be reached";
    connection("lost", "not connected");
    $("stale").textContent = `${reason}. Trying again. What is drawn here is the last that was seen.`;
    $("stale").hidden = false;
    if (!this.lost) say(`${reason}. Trying again.`);
    this.lost = true;
    await new Promise((done) => setTimeout(done, ms));
  },

  waitForKey(before) {
    connection("lost", "needs a key");
    return key !== before ? null : new Promise((done) => { keyGiven = done; });
  },

  shown() {
    connection("paused", "paused while hidden");
    return new Promise((done) => {
      const look = () => {
        if (document.hidden) return;
        document.removeEventListener("visibilitychange", look);
        done();
      };
      document.addEventListener("visibilitychange", look);
    });
  },
};
