// State that all tabs share: `view` has the current choices. A tab is an object with build(host),
// called once, and refresh(), called after every step or choice.

const RUNS = DATA.runs.map((run) => new Recording(run));
const view = {
  run: 0,
  step: 0,
  layer: 0,
  head: 0,
  kvHead: -1,
  own: false,
  query: null,
  row: null,
  position: null,
  pair: 0,
};
const now = () => RUNS[view.run];
const step = () => now().steps[view.step];
const newest = () => now().before[view.step + 1] - 1; // the last token that went in
const place = (fed) => `position ${fed} ${quoted(now().tokens[fed]?.[1] ?? "")}`;
const rowToken = (layer, row) => now().token(view.step, layer, row);
// The text under a column of a map.
const rowName = (row) => (rowToken(0, row) < 0 ? "old" : String(rowToken(0, row)));
const rowText = (row) => (rowToken(0, row) < 0 ? "" : tokenText(rowToken(0, row)));
const tokenText = (fed) => short(now().tokens[fed]?.[1] ?? "");
const rowPiece = (layer, row) =>
  rowToken(layer, row) < 0 ? "left from before" : now().tokens[rowToken(layer, row)][1];
const rowPlace = (layer, row) =>
  rowToken(layer, row) < 0 ? `row ${row}, left from before` : place(rowToken(layer, row));

function choice(host, text, options, chosen, changed) {
  const select = make(
    "select",
    {},
    ...options.map((name, i) => make("option", { value: i, textContent: name })),
  );
  select.value = chosen;
  select.addEventListener("change", () => {
    changed(Number(select.value));
    refreshTab();
  });
  host.append(make("label", {}, `${text} `, select));
  return select;
}
