// Judges answers that are typed into a page (numbers, texts, tuples, shapes and sets) by the data
// of compiled.py. It gives the same results as answers.py, slips.py and session.py; tests compare
// them.

// --- reading an answer ---------------------------------------------------------------------------

const THOUSANDS = /(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)/g;
const TOKEN =
  /\s*(\d[\d_]*\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|\*\*|\/\/|[-+*\/^()]|[a-z.]+)/iy;
const FUNCTIONS = { sqrt: Math.sqrt, exp: Math.exp, log: Math.log, ln: Math.log };

// The value of an arithmetic expression, with Python's precedence; NaN if it is not one.
function calculate(text) {
  const plain = text.replace(THOUSANDS, (number) => number.replaceAll(",", ""))
    .replace(/[−–]/g, "-").replace(/[×·]/g, "*").replace(/√/g, "sqrt ");
  const tokens = [];
  TOKEN.lastIndex = 0;
  for (let found; (found = TOKEN.exec(plain)); ) tokens.push(found[1]);
  const rest = plain.replace(/\s/g, "").slice(tokens.join("").length);
  if (rest.trim() || !tokens.length) return NaN;

  let at = 0;
  const take = (...wanted) => (wanted.includes(tokens[at]) ? tokens[at++] : "");

  function sum() {
    let x = product();
    for (let sign; (sign = take("+", "-")); ) x += sign === "+" ? product() : -product();
    return x;
  }

  function product() {
    let x = signed();
    for (let sign; (sign = take("*", "/", "//")); ) {
      const y = signed();
      if (sign === "*") x *= y;
      else if (sign === "/") x /= y;
      else x = Math.floor(x / y);
    }
    return x;
  }

  function signed() {
    if (take("-")) return -signed();
    if (take("+")) return signed();
    return power();
  }

  function power() {
    const x = atom();
    return take("**", "^") ? x ** signed() : x;
  }

  function atom() {
    if (take("(")) {
      const x = sum();
      return take(")") ? x : NaN;
    }
    const token = tokens[at++] ?? "";
    if (/^[\d.]/.test(token)) return Number(token.replaceAll("_", ""));
    const name = token.replace(/^(math|torch|np)\./, "");
    if (name === "e") return Math.E;
    return Object.hasOwn(FUNCTIONS, name) ? FUNCTIONS[name](atom()) : NaN;
  }

  const x = sum();
  return at === tokens.length ? x : NaN;
}

// The number in a text that may end with one of `units`; undefined if there is none.
function readNumber(text, units) {
  const known = [...units].sort((a, b) => b.length - a.length);
  const end = text.trim().toLowerCase();
  const unit = known.find((one) => end.endsWith(one.toLowerCase()));
  for (const left of unit ? [end.slice(0, -unit.length), end] : [end]) {
    const number = calculate(left);
    if (Number.isFinite(number)) return number;
  }
}

// The text without the brackets that enclose it, if there are any.
function inside(text) {
  const bare = text.trim().replace(/^(?:torch\.Size|tuple|list|set|frozenset)\s*(?=\()/, "");
  if (!/^[([{]/.test(bare)) return text.trim();
  let depth = 0;
  for (const [i, letter] of [...bare].entries()) {
    if ("([{".includes(letter)) depth += 1;
    if (")]}".includes(letter)) depth -= 1;
    if (depth === 0) return i === bare.length - 1 ? inside(bare.slice(1, -1)) : text.trim();
  }
  return text.trim();
}

// The parts of a text between separators outside of brackets.
function split(text, separator) {
  const parts = [""];
  let depth = 0;
  for (let i = 0; i < text.length; ) {
    const found = depth === 0 ? text.slice(i).match(separator) : null;
    if (found) {
      parts.push("");
      i += found[0].length;
      continue;
    }
    if ("([{".includes(text[i])) depth += 1;
    if (")]}".includes(text[i])) depth -= 1;
    parts[parts.length - 1] += text[i];
    i += 1;
  }
  return parts.map((part) => part.trim()).filter(Boolean);
}

const COMMA = /^\s*,\s*/;
const BAR = /^\s*[;|]\s*/;
const LOOSE = /^\s*(?:[;|]|,\s|and\b)\s*|^\s+/;
const BY = /(?<=\d)\s*[x×]\s*(?=\d)/g; // as in 288×192

// Ways to split a text into items, the strictest first. "4,096, 5" has a comma inside a number.
function ways(text) {
  const within = inside(text);
  const joined = within.replace(THOUSANDS, (number) => number.replaceAll(",", ""));
  const loose = (one) => split(one.replace(BY, " "), LOOSE);
  const strict = [split(within, COMMA), split(joined, COMMA), split(within, BAR)];
  return [...strict, loose(within), loose(joined)];
}

function word(text) {
  return text.trim().replace(/^(["'`])(.*)\1$/, "$2").toLowerCase().split(/\s+/).join(" ");
}

function readSet(text) {
  if (/^(?:none|nothing|∅|(?:frozen)?set\(\)|\{\s*\}|\[\s*\]|\(\s*\))$/i.test(text.trim())) {
    return { set: [] };
  }
  const [strict, , , loose] = ways(text);
  const items = (strict.length > 1 ? strict : loose).map(word);
  const found = new Set(items);
  const repeats = found.size < items.length && !/^\s*\{/.test(text);
  return repeats ? undefined : { set: [...found].sort() };
}

// The value in a text, in the form of another value; undefined if the text has another form.
// `units` has one entry per number, or one for all.
function read(text, form, units = []) {
  if (typeof form === "number") return readNumber(text, units[0] ?? []);
  if (typeof form === "string") return /[,()[\]{}]/.test(text) ? undefined : word(text);
  if (!Array.isArray(form)) return readSet(text);
  for (const parts of ways(text)) {
    if (parts.length !== form.length) continue;
    const one = (i) => (units.length > 1 ? [units[i]] : units);
    const items = parts.map((part, i) => read(part, form[i], one(i)));
    if (!items.includes(undefined)) return items;
  }
}

// --- judging it ----------------------------------------------------------------------------------

function same(answer, right, [rel, atol]) {
  if (answer === undefined) return false;
  if (typeof right === "number") {
    const room = Math.max(atol, rel * Math.abs(right));
    return typeof answer === "number" && Math.abs(answer - right) <= room;
  }
  if (typeof right === "string") return answer === word(right);
  if (Array.isArray(right)) {
    const alike = right.every((item, i) => same(answer[i], item, [rel, atol]));
    return answer.length === right.length && alike;
  }
  return answer.set.join("\n") === right.set.join("\n");
}

// The pair of known mistakes that together explain an answer; null if no pair or several do.
function pair(answer, { rows, near, factors }) {
  const right = rows[0].value;
  const known = rows.slice(1).filter((row) => !row.alone);
  const explains = factors && typeof right === "number" ? byFactors : byParts;
  const found = known.flatMap((a, i) => known.slice(i + 1)
    .filter((b) => explains(answer, right, a.value, b.value, near)).map((b) => [a, b]));
  return found.length === 1 ? found[0] : null;
}

function byFactors(answer, right, x, y, near) {
  const numbers = typeof x === "number" && typeof y === "number" && right !== 0;
  return numbers && same(answer, (x * y) / right, near);
}

// Is each item right or that of one of the two mistakes, and are both mistakes needed?
function byParts(answer, right, x, y, near) {
  const all = [answer, right, x, y];
  if (!all.every((one) => Array.isArray(one) && one.length === right.length)) return false;
  const wrong = right.map((_, i) => i).filter((i) => !same(answer[i], right[i], near));
  const ofX = wrong.map((i) => same(answer[i], x[i], near));
  const ofY = wrong.map((i) => same(answer[i], y[i], near));
  return ofX.every((x, i) => x || ofY[i]) && !ofX.every(Boolean) && !ofY.every(Boolean);
}

const isBlank = (text) => !text.trim() || /\.\.\.|…/.test(text);

// {state, message} of an answer. States: right, wrong, unanswered.
function judge(data, text) {
  if (isBlank(text)) return { state: "unanswered", message: "Type an answer first." };
  const near = data.near ?? [0, 0];
  const known = data.rows.find(({ value }) => same(read(text, value, data.units), value, near));
  if (known) return { state: known.state, message: known.message };
  const answer = read(text, data.rows[0].value, data.units);
  if (!fits(data, text, answer)) return { state: "wrong", message: data.misfit };
  const both = pair(answer, data);
  if (!both) return { state: "wrong", message: data.otherwise };
  const [a, b] = both;
  return { state: "wrong", message: `Two slips at once. ${a.message} And: ${b.message}` };
}

// Does the answer have the form of the right one? A list may have any number of items.
function fits({ rows, names, open }, text, answer) {
  if (names?.length) return answer?.set.every((name) => names.includes(name)) ?? false;
  if (!open) return answer !== undefined;
  const item = rows[0].value[0];
  return ways(text).some((parts) => parts.every((part) => read(part, item) !== undefined));
}

// --- predictions ---------------------------------------------------------------------------------

// {number, message} of a prediction, or only {message} if the text is not one.
function predicted({ id, unit, units, signed }, text) {
  const number = isBlank(text) ? undefined : readNumber(text, units);
  if (number === undefined) {
    const how = "Write a number: a half is 0.5, a thousand 1000 or 1,000.";
    return { message: `${id}: no prediction yet. ${how}` };
  }
  if (number < 0 && !signed) {
    const why = "is impossible: the number is 0 or more.";
    return { message: `${id}: no prediction yet. ${quantity(number, unit)} ${why}` };
  }
  return { number, message: `${id}: you predict ${quantity(number, unit)}.` };
}

// 1,024 tokens; 0.0213 s. Four digits, as Python's format ",.4g" has them.
function quantity(number, unit = "") {
  const size = Math.abs(number);
  const whole = Number.isInteger(number) || size >= 1000;
  return `${whole && size < 1e15 ? grouped(number) : digits(number, 4)} ${unit}`.trimEnd();
}

// Python's format ",.0f": halves go to the even number.
function grouped(number) {
  const tie = Math.abs(number % 1) === 0.5;
  const whole = tie ? 2 * Math.round(number / 2) : Number(number.toFixed(0));
  return (whole || 0).toLocaleString("en-US", { maximumFractionDigits: 0 });
}

// Python's format ",.{n}g".
function digits(number, n) {
  const rounded = halfEven(number, n);
  const [mantissa, exponent] = rounded.toExponential().split("e");
  const power = Number(exponent);
  if (power >= -4 && power < n) {
    return rounded.toLocaleString("en-US", { maximumFractionDigits: 12 });
  }
  const sign = power < 0 ? "-" : "+";
  return `${mantissa}e${sign}${String(Math.abs(power)).padStart(2, "0")}`;
}

// A number to n digits. toPrecision rounds a half up, but Python rounds it to the even digit.
function halfEven(number, n) {
  const [mantissa, exponent] = Math.abs(number).toExponential(100).split("e");
  const all = mantissa.replace(".", "");
  const down = /^50*$/.test(all.slice(n)) && "02468".includes(all[n - 1]);
  if (!down) return Number(number.toPrecision(n));
  return Math.sign(number) * Number(`${all[0]}.${all.slice(1, n)}e${exponent}`);
}

// How far off a guess is, in words.
function comment(guess, measured) {
  if (guess === measured) return "exactly right";
  const side = guess > measured ? "high" : "low";
  if (guess === 0 || measured === 0) {
    return `too ${side} by ${quantity(Math.abs(guess - measured))}`;
  }
  if (guess > 0 !== measured > 0) return "even the sign differs";
  const decades = Math.log10(Math.abs(guess)) - Math.log10(Math.abs(measured));
  const larger = decades > 0 ? "high" : "low";
  if (Math.abs(decades) >= 6) return `too ${larger} by 10^${Math.abs(decades).toFixed(0)}`;
  const factor = Math.max(guess / measured, measured / guess);
  if (factor <= 1.1) return "within a tenth";
  if (factor <= 2) return `the right size, ${digits(factor, 2)} times too ${larger}`;
  return `${grouped(factor)} times too ${larger}`;
}

// A prediction and what was measured, side by side.
function compared({ id, measured, unit }, guess, said) {
  const name = unit || said;
  const both = `you predicted ${quantity(guess, name)}, it is ${quantity(measured, name)}`;
  return `${id}: ${both}: ${comment(guess, measured)}.`;
}
