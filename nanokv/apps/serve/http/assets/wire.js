// The connection to the server: the API key, events of a response, and the stream of snapshots.

const $ = (id) => document.getElementById(id);
const KEPT = "nanokv-serve"; // prefix of keys in sessionStorage, which lasts as long as this tab
const SILENT_MS = 15000; // the server sends an event or a comment at least every 5 s
const BACK_OFF = [500, 1000, 2000, 4000, 8000]; // milliseconds before each attempt to reconnect

const TAB = [...crypto.getRandomValues(new Uint8Array(12))]
  .map((byte) => byte.toString(16).padStart(2, "0"))
  .join("");

// A stored value, or the default if there is none or the browser refuses storage.
function recall(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(`${KEPT}-${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function remember(name, value) {
  try {
    sessionStorage.setItem(`${KEPT}-${name}`, JSON.stringify(value));
  } catch { /* without storage nothing is kept */ }
}

let key = recall("key", "");

function headers() {
  const found = { "X-Nanokv-Tab": TAB };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

// An error that the server reports in OpenAI's format.
class Refusal extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super([error.message ?? `status ${status}`, body?.hint].filter(Boolean).join(" · "));
    this.status = status;
    this.code = error.code;
  }
}

// A successful response, or a Refusal.
async function ask(path, options = {}) {
  const all = { ...headers(), ...options.headers };
  const response = await fetch(path, { ...options, headers: all, cache: "no-store" });
  if (response.ok) return response;
  const refusal = new Refusal(response.status, await response.json().catch(() => null));
  if (refusal.code === "invalid_api_key") askKey();
  throw refusal;
}

// The data of each server-sent event. `received` is called for every chunk of bytes.
async function* events(response, received = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      received();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- the API key ---------------------------------------------------------------------------------

let keyGiven = () => {};

function askKey() {
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
  if (key) say("The server does not accept this API key.");
}

function useKey(event) {
  event.preventDefault();
  const given = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    say("A key is made of visible ASCII characters without blanks.");
    return;
  }
  key = given;
  remember("key", key);
  $("key").value = "";
  $("key-form").hidden = true;
  $("text").focus();
  keyGiven();
}

// --- announcements -------------------------------------------------------------------------------

// Announces a text to screen readers. They do not announce an unchanged text, so a text that is
// repeated gets a space.
function say(text) {
  const said = $("said");
  said.textContent = said.textContent === text ? `${text}\u00a0` : text;
}

function connection(kind, text) {
  $("connection").className = `state ${kind}`;
  $("connection").textContent = text;
}

// --- snapshots -----------------------------------------------------------------------------------

const live = {
  failures: 0,
  stream: null,
  lost: false,

  // Reconnects for as long as the page exists.
  async run() {
    for (;;) {
      // A hidden page has no connection, because a browser opens at most six per server.
      if (document.hidden) await this.shown();
      const before = key;
      const trouble = await this.watch().catch((error) => error);
      if (document.hidden) continue;
      if (trouble?.code === "invalid_api_key") await this.waitForKey(before);
      else await this.wait(trouble);
    }
  },

  // Shows snapshots until the stream ends. Returns the error that the server sent, if any.
  async watch() {
    this.stream = new AbortController();
    let timer = null;
    let silent = false;
    const received = () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        silent = true;
        this.stream.abort();
      }, SILENT_MS);
    };
    try {
      received();
      const response = await ask("/live", { signal: this.stream.signal });
      for await (const event of events(response, received)) {
        const found = JSON.parse(event);
        if (found.error) return new Refusal(0, found);
        this.opened();
        cache.show(found);
      }
    } catch (error) {
      if (silent) return new Error("the server has stopped sending");
      throw error;
    } finally {
      clearTimeout(timer);
    }
  },

  opened() {
    this.failures = 0;
    connection("open", "live");
    $("stale").hidden = true;
    if (this.lost) say("Connected again.");
    this.lost = false;
  },

  async wait(trouble) {
    const pause = BACK_OFF[Math.min(this.failures, BACK_OFF.length - 1)];
    this.failures += 1;
    let reason = "The server cannot be reached";
    if (trouble instanceof Refusal) reason = trouble.message;
    connection("lost", "not connected");
    $("stale").textContent = `${reason}. Trying again. The figures show the last known state.`;
    $("stale").hidden = false;
    if (!this.lost) say(`${reason}. Trying again.`);
    this.lost = true;
    const jittered = pause * (0.8 + 0.4 * Math.random());
    await new Promise((done) => setTimeout(done, jittered));
  },

  waitForKey(before) {
    connection("lost", "needs a key");
    if (key !== before) return null;
    return new Promise((done) => { keyGiven = done; });
  },

  // Resolves when the page is visible.
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
