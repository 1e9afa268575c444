"use strict";
// Greedy answers. A lane is one way to compute them: its tokens, its cache, and the cost so far.

class Lane {
  constructor(model, cache, how = RIGHT) {
    Object.assign(this, {
      model,
      cache,
      how,
      ids: [],
      waiting: [],
      rows: 0,
      multiplyAdds: 0,
      milliseconds: 0,
    });
  }

  begin(ids) {
    // make `ids` the tokens to compute next
    this.ids.push(...ids);
    this.waiting = [...ids]; // all tokens before them are in the cache
  }

  go(most = Infinity) {
    // compute at most this many rows → the logits, or null while more tokens are left to compute
    const part = this.waiting.splice(0, most);
    const before = work.multiplyAdds;
    const began = performance.now();
    const hidden = this.model.forward(part, this.cache, this.cache.length, this.how);
    const logits = this.waiting.length ? null : this.model.logits(hidden);
    this.rows += part.length;
    this.multiplyAdds += work.multiplyAdds - before;
    this.milliseconds += performance.now() - began;
    return logits;
  }

  keep(n) {
    // remove the tokens from n on
    this.cache.truncate(n);
    this.ids.length = n;
  }
}

class ForgetfulLane extends Lane {
  // without a cache: keys and values are dropped after every token
  begin(ids) {
    super.begin(ids);
    this.cache = makeCache("dict", this.model);
    this.waiting = [...this.ids];
  }

  keep(n) {
    this.ids.length = n;
  }
}

function common(a, b) {
  // length of the common prefix of two lists of ids
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n++;
  return n;
}

function ask(lane, ids) {
  // begin a prompt, without the part that the lane has already read
  const kept = Math.min(common(lane.ids, ids), lane.cache.length, ids.length - 1);
  if (kept < lane.ids.length) lane.keep(kept);
  lane.begin(ids.slice(kept));
}

function answerTo(lane, ids, most, ends) {
  // the whole answer at once → {ids, and the logits that each was chosen from}
  ask(lane, ids);
  const answer = { ids: [], logits: [] };
  for (;;) {
    answer.logits.push(lane.go());
    answer.ids.push(largest(answer.logits.at(-1)));
    if (answer.ids.length === most || ends.includes(answer.ids.at(-1))) return answer;
    lane.begin([answer.ids.at(-1)]);
  }
}

function talk(lane, tokenizer, turns, most, ends) {
  // user turns, each answered → [{text, ids, logits}]
  const messages = [];
  const answers = [];
  for (const content of turns) {
    messages.push({ role: "user", content });
    const answer = answerTo(lane, tokenizer.encode(tokenizer.render(messages)), most, ends);
    answers.push({ ...answer, text: tokenizer.decode(answer.ids) });
    messages.push({ role: "assistant", content: answers.at(-1).text });
  }
  return answers;
}
