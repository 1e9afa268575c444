// Parts of every picture: elements, the theme's colours, and a figure with its numbers as a table.

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for" || name === "scope")
      element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

function shape(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let serial = 0;

// A title, room for a picture, a line about the cell under the cursor, and the numbers as a table.
class Figure {
  constructor(host, title, table) {
    const id = `table-${++serial}`;
    this.table = table;
    this.title = make("figcaption", { textContent: title });
    this.body = make("div", { className: "picture" });
    this.readout = make("p", { className: "readout", role: "status" });
    this.box = make("div", {
      className: "table-box",
      id,
      hidden: true,
      tabIndex: 0,
      role: "region",
    });
    this.box.setAttribute("aria-label", `${title}, as a table`);
    this.button = make("button", {
      type: "button",
      className: "twin",
      textContent: "Show as table",
      "aria-expanded": "false",
      "aria-controls": id,
    });
    this.button.addEventListener("click", () => this.toggle());
    this.element = make("figure", {}, this.title, this.body, this.readout, this.button, this.box);
    host.append(this.element);
  }

  toggle() {
    this.box.hidden = !this.box.hidden;
    this.button.textContent = this.box.hidden ? "Show as table" : "Hide the table";
    this.button.setAttribute("aria-expanded", String(!this.box.hidden));
    this.fill();
  }

  fill() {
    if (this.box.hidden) return;
    const { caption, head, rows } = this.table();
    const cells = (row) =>
      row.map((text, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, String(text)));
    this.box.replaceChildren(
      make(
        "table",
        {},
        make("caption", { textContent: caption }),
        make(
          "thead",
          {},
          make("tr", {}, ...head.map((text) => make("th", { scope: "col", textContent: text }))),
        ),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))),
      ),
    );
  }
}

const LETTERS = '11px ui-monospace, "DejaVu Sans Mono", monospace';

// The size of a canvas in CSS pixels, sharp on every screen.
function sized(canvas, width, height) {
  const sharp = window.devicePixelRatio || 1;
  canvas.width = Math.ceil(width * sharp);
  canvas.height = Math.ceil(height * sharp);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.getContext("2d").scale(sharp, sharp);
}

// --- theme ---------------------------------------------------------------------------------------

const darkRules = [...document.styleSheets[0].cssRules].filter((rule) =>
  rule.media?.mediaText.includes("prefers-color-scheme"),
);
const SCHEMES = {
  dark: ["screen", "dark"],
  light: ["not all", "light"],
  system: ["(prefers-color-scheme: dark)", ""],
};

function wear(theme) {
  // "system" follows the setting of the reader's machine.
  const [media, scheme] = SCHEMES[theme];
  for (const rule of darkRules) rule.media.mediaText = media;
  document.documentElement.style.colorScheme = scheme;
}
