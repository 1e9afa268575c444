"use strict";
// The experiments: a prediction first, then both answers side by side. The explanations are derived
// from the two runs.

const OUTCOMES = [
  "nothing: the same words from the same numbers",
  "the numbers, but not the words",
  "the words",
];
// A smaller change of a logit counts as none. Sums in another order move it by less than 1e-5.
const SAME = 1e-3;
const LIMIT = 40; // tokens of an answer
const BEFORE = ["My name is Ada. I have a dog called Rex."];
const RECALL = ["My name is Zorbla.", "Reverse: moon, kettle, blorf", "What is my name?"];
const ONE = ["My name is Zorbla. What is my name?"];

const TOLD = 2; // index in OUTCOMES: the reader can see the change in the words
const moved = (gap) => `The logits moved by up to ${figures(gap, 3)}.`;

// why(right, wrong, gap, found): explains the two runs. The conversation may be the user's.
const EXPERIMENTS = [
  {
    title: "no cache",
    turns: ONE,
    ways: [["", "off"]],
    question: "Nothing is kept. For every new token, the whole conversation is computed again.",
    why: (right, wrong) =>
      `${count(wrong.rows)} tokens were computed instead of ${count(right.rows)}: ` +
      `${(wrong.rows / right.rows).toFixed(1)} times the work. A cache saves work and changes no answer.`,
  },
  {
    title: "position one too far",
    turns: ONE,
    ways: [["", "oneTooFar"]],
    question:
      "Each new token is rotated to the position after its own, because the loop counts it before " +
      "it is fed.",
    why: (right, wrong, gap, found) =>
      `${moved(gap)} Distances inside the answer stay right, only the gap to the prompt ` +
      `is wrong. ${found < TOLD ? "The answer does not show this bug: compare logits." : ""}`,
  },
  {
    title: "position from zero",
    turns: ONE,
    ways: [["", "restarts"]],
    question:
      "Each call counts positions from 0, so every new token is rotated as if it began the text.",
    why: (right, wrong, gap) =>
      `${moved(gap)} The first prompt is read right, and the first token after it is right too. ` +
      "Each later token gets a wrong position.",
  },
  {
    title: "cache not cleared",
    turns: ["What is my name?"],
    ways: [["", "notCleared"]],
    question:
      `Another chat said before: “${BEFORE[0]}” Now a new chat begins at position 0, but the old ` +
      "keys and values are still in the cache.",
    why: (right, wrong) =>
      `The new chat saw ${count(wrong.stale)} keys of the chat before. Their positions also begin ` +
      "at 0, so the model cannot tell them from its own.",
  },
  {
    title: "mask multiplied",
    turns: ONE,
    ways: [["", "multiplied"]],
    question:
      "A prompt is read at once, and a mask hides later tokens. The mask should add −∞ to their " +
      "scores. Here it multiplies the scores by 0.",
    why: (right, wrong, gap) =>
      `${moved(gap)} A score of 0 hides nothing: e⁰ = 1, so later tokens keep some weight. In ` +
      "training, the same bug lets a model see the tokens that it should predict.",
  },
  {
    title: "window of 64",
    turns: RECALL,
    ways: [
      ["without sinks", "sliding:window=64"],
      ["with 4 sinks", "sliding:window=64:sinks=4"],
    ],
    question:
      "The cache keeps only the newest 64 tokens. Sinks are the first tokens of the text; the " +
      "cache can keep them too.",
    why: (right, wrong) =>
      wrong.length === wrong.held
        ? "The whole conversation fits in the window. Make it longer to see a difference."
        : `${count(wrong.length - wrong.held)} of ${count(wrong.length)} tokens had left the ` +
          `window at the end. The cache stays at ${bytes(wrong.nbytes)}, however long the ` +
          "conversation is. Tokens that have left are forgotten, with or without sinks.",
  },
  {
    title: "keys in few bits",
    turns: RECALL,
    ways: [
      ["4 bits", "quantized:k_bits=4:group=16:residual=16"],
      ["2 bits", "quantized:k_bits=2:group=16:residual=16"],
    ],
    question:
      "Keys are stored in 4 or 2 bits per number instead of 32, and values in 8. The newest 16 to " +
      "32 tokens stay exact.",
    why: (right, wrong, gap, found) =>
      `${moved(gap)} The cache takes ${bytes(wrong.nbytes)} instead of ` +
      `${bytes(right.nbytes)}. ` +
      (found < TOLD ? "The words are the same: the likeliest token is often far ahead." : ""),
  },
  {
    title: "pages",
    turns: RECALL,
    ways: [
      ["of 4 tokens", "paged:page=4"],
      ["of 16", "paged:page=16"],
      ["of 64", "paged:page=64"],
    ],
    question:
      "Keys and values are stored in pages of a few tokens, anywhere in memory. A table has the " +
      "page of each token.",
    why: (right, wrong) =>
      `The place of a number does not change it. The pages take ${bytes(wrong.nbytes)}, of which ` +
      `${bytes(right.nbytes)} are used: the last page is not full. Small pages waste less, large ` +
      "ones need a shorter table.",
  },
];

const chosen = { experiment: EXPERIMENTS[0], way: EXPERIMENTS[0].ways[0][1], guess: -1 };

function held(lane) {
  // one side of an experiment, computed
  const [first] = lane.cache.layers;
  return {
    rows: lane.rows,
    nbytes: lane.cache.nbytes,
    length: lane.cache.length,
    stale: first.stale,
    held: first.keys.length / first.width,
    milliseconds: lane.milliseconds,
  };
}

function side(name, turns) {
  const before = plain(model);
  if (name === "notCleared") talk(before, tokenizer, BEFORE, LIMIT, DATA.ends);
  const lane = way(name)(model, before);
  const answers = talk(lane, tokenizer, turns, LIMIT, DATA.ends);
  return { answers, ...held(lane) };
}

function distance(right, wrong) {
  // the largest change of a logit up to the first token that differs
  let most = 0;
  for (const [n, { ids, logits }] of right.answers.entries()) {
    const other = wrong.answers[n];
    for (let i = 0; i <= Math.min(common(ids, other.ids), ids.length - 1); i++) {
      logits[i].forEach((x, id) => {
        most = Math.max(most, Math.abs(x - other.logits[i][id]));
      });
    }
    if (common(ids, other.ids) < ids.length) break;
  }
  return most;
}

function outcome(right, wrong, gap) {
  // an index in OUTCOMES
  const words = right.answers.some(({ text }, n) => text !== wrong.answers[n].text);
  return words ? TOLD : gap < SAME ? 0 : 1;
}

function transcript(host, turns, answers, others) {
  // mark the words that the other side does not have
  host.replaceChildren(
    ...turns.flatMap((turn, n) => {
      const theirs = new Set(others[n].text.split(" "));
      const said = answers[n].text
        .split(" ")
        .flatMap((word) => [theirs.has(word) ? word : make("mark", { textContent: word }), " "]);
      return [make("p", { className: "user", textContent: turn }), make("p", {}, ...said)];
    }),
  );
}

function problem(turns) {
  // why this conversation cannot be run, or ""
  const tokens = tokenizer.encode(turns.join("\n")).length;
  if (!turns.length) return "Say something first.";
  return tokens > LONGEST / 2 ? `Too long: ${tokens} tokens, at most ${LONGEST / 2}.` : "";
}

function compare() {
  // both sides, and what they show
  if (chosen.guess < 0) return; // another experiment was chosen meanwhile
  const { experiment, way: name, guess } = chosen;
  const turns = $("turns")
    .value.split("\n")
    .map((turn) => turn.trim())
    .filter(Boolean);
  $("needed").textContent = problem(turns);
  if (problem(turns)) return;
  const right = side("right", turns);
  const wrong = side(name, turns);
  const gap = distance(right, wrong);
  const found = outcome(right, wrong, gap);
  $("outcome").hidden = false;
  $("verdict").textContent =
    `${found === guess ? "You predicted it." : `You predicted ${OUTCOMES[guess].split(":")[0]}.`} ` +
    `What changed: ${OUTCOMES[found]}.`;
  $("wrong-title").textContent = `changed: ${experiment.title}`;
  transcript($("right"), turns, right.answers, wrong.answers);
  transcript($("wrong"), turns, wrong.answers, right.answers);
  $("differences").replaceChildren(
    ...grid(
      ["", "as it should be", "changed"],
      [
        ["tokens computed", count(right.rows), count(wrong.rows)],
        [
          "cache at the end",
          bytes(right.nbytes),
          name === "off" ? "nothing is kept" : bytes(wrong.nbytes),
        ],
        ["time here", clock(right.milliseconds), clock(wrong.milliseconds)],
        ["largest change of a logit", "", gap < SAME ? "0" : figures(gap, 3)],
      ],
    ),
  );
  $("why").textContent = experiment.why(right, wrong, gap, found);
  $("outcome").scrollIntoView({ block: "nearest", behavior: still.matches ? "auto" : "smooth" });
}

function radios(host, name, labels, pick) {
  // a group of choices; pick(n) when one is chosen
  for (const label of host.querySelectorAll("label")) label.remove();
  host.append(
    ...labels.map((text, n) => {
      const input = make("input", { type: "radio", name, value: n });
      input.addEventListener("change", () => pick(n));
      return make("label", {}, input, ` ${text}`);
    }),
  );
}

function forget() {
  // another experiment, another prediction
  chosen.guess = -1;
  $("run").disabled = true;
  $("needed").textContent = "Choose a prediction first.";
  $("outcome").hidden = true;
  radios($("guesses"), "guess", OUTCOMES, (n) => {
    chosen.guess = n;
    $("run").disabled = false;
    $("needed").textContent = "";
  });
}

function choose(n) {
  const experiment = EXPERIMENTS[n];
  chosen.experiment = experiment;
  chosen.way = experiment.ways[0][1];
  $("question").textContent = experiment.question;
  $("turns").value = experiment.turns.join("\n");
  $("turns").rows = experiment.turns.length;
  const several = experiment.ways.length > 1;
  const titles = several ? experiment.ways.map(([title]) => title) : [];
  radios($("variants"), "variant", titles, (w) => {
    chosen.way = experiment.ways[w][1];
    forget();
  });
  $("variants").hidden = !several;
  if (several) $("variants").querySelector("input").checked = true;
  forget();
}

radios(
  $("choices"),
  "change",
  EXPERIMENTS.map(({ title }) => title),
  choose,
);
$("choices").querySelector("input").checked = true;
choose(0);
$("experiment").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chosen.guess < 0) return;
  $("needed").textContent = "Both run …";
  requestAnimationFrame(() => setTimeout(compare)); // once that can be read
});
