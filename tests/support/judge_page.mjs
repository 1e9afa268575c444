// assets/judge.js, run by node: its first argument is the script, stdin a list of [function, …arguments] as JSON,
// stdout the list of what the functions returned.

import { readFileSync } from "node:fs";
import vm from "node:vm";

globalThis.jobs = JSON.parse(readFileSync(0, "utf-8"));
vm.runInThisContext(readFileSync(process.argv[2], "utf-8"));
const results = vm.runInThisContext(`
  const known = { judge, read, calculate, predicted, quantity, comment, compared };
  jobs.map(([name, ...given]) => known[name](...given) ?? null)
`);
process.stdout.write(JSON.stringify(results));
