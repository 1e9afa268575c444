// The engine of a page of `nanokv live`, run by node: its first argument is the page, stdin a list of jobs as JSON,
// stdout the list of their results. What runs are the page's own scripts, weights and tokenizer.

import { readFileSync } from "node:fs";
import vm from "node:vm";

const page = readFileSync(process.argv[2], "utf-8");
const inside = (id) => page.match(new RegExp(`<script[^>]* id="${id}">([^]*?)</script>`))[1];
// In node's own context: another one looks its globals up by a slow way.
globalThis.parts = { data: inside("data"), weights: inside("weights"), jobs: readFileSync(0, "utf-8") };
vm.runInThisContext(inside("engine"));
process.stdout.write(vm.runInThisContext(`
  const { config, tokenizer: file, ends } = JSON.parse(parts.data);
  const began = performance.now();
  const tokenizer = new Tokenizer(file), model = new Model(config, readSafetensors(fromBase64(parts.weights)));
  const loaded = performance.now() - began;
  const JOBS = {
    loaded: () => loaded,
    encode: ({ texts }) => texts.map((text) => tokenizer.encode(text)),
    decode: ({ lists }) => lists.map((ids) => tokenizer.decode(ids)),
    pieces: ({ lists }) => lists.map((ids) => ids.map((id) => tokenizer.piece(id))),
    render: ({ messages }) => tokenizer.render(messages),
    score: ({ ids }) => { // the logits of every position, one behind the other
      const hidden = model.forward(ids, makeCache("dict", model), 0, RIGHT);
      return [...linear(hidden, model.embedding, config.hidden_size)];
    },
    round: ({ rows, bits }) => rows.map((row) => {
      const x = Float32Array.from(row);
      roundToBits(x, 0, x.length, 1, bits);
      return [...x];
    }),
    answers: ({ prompts, most }) => prompts.map((ids) => answerTo(plain(model), ids, most, ends).ids),
    talk: ({ name, before, turns, most }) => {
      const first = plain(model);
      if (before) talk(first, tokenizer, before, most, ends);
      const lane = way(name)(model, first), answers = talk(lane, tokenizer, turns, most, ends);
      return {
        answers: answers.map(({ ids, logits, text }) => ({
          ids, text, first: [...logits[0]], last: [...logits.at(-1)],
        })),
        nbytes: lane.cache.nbytes, length: lane.cache.length, rows: lane.rows, multiplyAdds: lane.multiplyAdds,
        milliseconds: lane.milliseconds,
      };
    },
  };
  JSON.stringify(JSON.parse(parts.jobs).map((job) => JOBS[job.do](job)));
`));
