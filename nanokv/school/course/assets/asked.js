// The forms of a page of the course. An answer is judged at once and stored in this browser. A
// measurement stays hidden until the reader predicts it.
(() => {
  const key = (id) => `nanokv-answer-${id}`;
  const decoded = (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return JSON.parse(new TextDecoder().decode(bytes));
  };
  const tried = new Set();
  const guesses = new Map(); // id → {number, unit}

  function kept(id) {
    try {
      return localStorage.getItem(key(id));
    } catch { // a browser may forbid it
      return null;
    }
  }

  function keep(id, text) {
    try {
      localStorage.setItem(key(id), text);
    } catch {}
  }

  // --- the forms ---------------------------------------------------------------------------------

  const WORDS = { right: "Right.", wrong: "Not yet.", unanswered: "" };

  function say(form, state, message) {
    form.dataset.state = state;
    form.querySelector("[role=status]").textContent = `${WORDS[state] ?? ""} ${message}`.trim();
  }

  function answer(form, data, text) {
    const { state, message } = judge(data, text);
    say(form, state, message);
    if (state !== "unanswered") uncover(data);
  }

  function guess(form, data, text) {
    const { number, message } = predicted(data, text);
    if (number === undefined) {
      say(form, "unanswered", message);
      return;
    }
    say(form, "predicted", message);
    guesses.set(data.id, { number, unit: data.unit });
    const place = document.getElementById(`measured-${data.id}`);
    if (place) form.querySelector("[role=status]").append(" ", linkTo(place));
    uncover(data);
    compare();
  }

  function linkTo(place) {
    const link = document.createElement("a");
    link.href = `#${place.id}`;
    link.textContent = "What was measured";
    return link;
  }

  // Show the cells that contain answers once every form before them has been tried.
  function uncover({ id, answer: right }) {
    tried.add(id);
    for (const fold of document.querySelectorAll("details[data-for]")) {
      const ids = fold.dataset.for.split(" ");
      if (!ids.every((one) => tried.has(one))) continue;
      if (fold.hidden && right) {
        const line = document.createElement("p");
        line.textContent = `${id}: ${right}`;
        fold.querySelector("summary").after(line);
      }
      fold.hidden = false;
    }
  }

  function cover(data) {
    for (const fold of document.querySelectorAll("details[data-for]")) {
      if (fold.dataset.for.split(" ").includes(data.id)) fold.hidden = true;
    }
  }

  const JUDGES = { value: answer, choice: answer, predict: guess };
  const forms = [...document.querySelectorAll("form.asked")]
    .map((form) => ({ form, data: decoded(form.dataset.asked), take: JUDGES[form.dataset.kind] }));

  // --- the measurements --------------------------------------------------------------------------

  const measurements = [...document.querySelectorAll(".measured")].map((box) => ({
    data: decoded(box.dataset.asked),
    outputs: box.querySelectorAll(".output_wrapper"),
    line: box.querySelector(".reveal"),
  }));
  const shown = new Set(); // ids that are shown without a prediction

  function compare() {
    for (const { data, outputs, line } of measurements) {
      const made = guesses.get(data.id);
      const covered = !made && !shown.has(data.id) && document.getElementById(`typed-${data.id}`);
      for (const output of outputs) output.hidden = covered;
      if (covered) {
        const ways = [predictFirst(data), " ", showNow(data)];
        line.replaceChildren(`${data.id} is measured here. `, ...ways);
      } else if (made) {
        line.textContent = compared(data, made.number, made.unit);
      } else {
        line.textContent = `${data.id}: it is ${quantity(data.measured, data.unit)}.`;
      }
    }
  }

  function predictFirst({ id }) {
    const link = document.createElement("a");
    link.href = `#typed-${id}`;
    link.textContent = "Predict it first";
    return link;
  }

  function showNow({ id }) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Show it without a prediction";
    button.addEventListener("click", () => {
      shown.add(id);
      compare();
      const line = document.getElementById(`measured-${id}`);
      line.tabIndex = -1;
      line.focus();
    });
    return button;
  }

  // --- the start ---------------------------------------------------------------------------------

  for (const { form, data } of forms) {
    form.hidden = false;
    cover(data);
  }
  for (const { form, data, take } of forms) {
    const text = kept(data.id);
    const field = form.querySelector("input:not([type=radio])");
    if (field && text !== null) field.value = text;
    for (const option of form.querySelectorAll("[type=radio]")) {
      option.checked = option.value === text;
    }
    if (text !== null) take(form, data, text);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field) return;
      keep(data.id, field.value);
      take(form, data, field.value);
    });
    form.addEventListener("change", ({ target }) => {
      if (target === field) return;
      keep(data.id, target.value);
      take(form, data, target.value);
    });
  }
  compare();
})();
