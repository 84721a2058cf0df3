// Elements, and formats of figures. Text enters the page only as text nodes, so it cannot run as script.

/** Create an element. `props`: class, attributes, listeners (on...) and data. */
export function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((x) => x !== null && x !== undefined));
  return node;
}

/** Set a text only if it differs: every write costs a layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Update the children of `parent` to match `items`, in order. Existing nodes are kept.
 * `create(item)` returns a node, `update(node, item)` fills it. */
export function keep(parent, items, keyOf, create, update) {
  const known = (parent.known ??= new Map());
  const seen = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let node = known.get(key);
    if (!node) known.set(key, (node = create(item)));
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
  for (const [key, node] of known) {
    if (seen.has(key)) continue;
    node.remove();
    known.delete(key);
  }
}

/** Return a table. Cells are texts or nodes; the first cell of a row is its header. The first
 * `words` columns hold text, not figures. `textAt`: index of the column with long text, if any. */
export function table(caption, heads, rows, props = {}, { words = 1, textAt = -1 } = {}) {
  const kind = (i) => ({ class: i === textAt ? "text" : i < words ? "word" : "" });
  const row = ([first, ...cells]) => make("tr", {},
    make("th", { scope: "row" }, first), ...cells.map((x, i) => make("td", kind(i + 1), x)));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", props,
      make("caption", {}, caption),
      make("thead", {}, make("tr", {}, ...heads.map((x, i) => make("th", { scope: "col", ...kind(i) }, x)))),
      make("tbody", {}, ...rows.map(row))));
}

const formats = Array.from({ length: 7 }, (_, digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
export const number = (x, digits = 0) => formats[digits].format(x);

export function seconds(s) {
  if (s === undefined || s === null || Number.isNaN(s)) return "–";
  if (s < 0.0995) return `${(s * 1e3).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 1) return `${Math.round(s * 1e3)} ms`;
  return s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${Math.round(s / 60)} min`;
}

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; n >= 1000 && i < units.length - 1; i++) n /= 1000;
  return `${n < 10 && i ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export const percent = (x) => (x === undefined || x === null || Number.isNaN(x) ? "–" : `${Math.round(x * 100)} %`);

/** Return the quantile `share` of the sorted `values`, or undefined without values. */
export const quantile = (values, share) =>
  values[Math.min(values.length - 1, Math.floor(share * values.length))];

/** Compare names with numbers in natural order: decode-2 before decode-10. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;

/** Set the options of a select; "" stands for all. */
export function setChoices(select, values, all) {
  const wanted = ["", ...values];
  const shown = [...select.options].map((x) => x.value);
  if (shown.length && wanted.join("\n") === shown.join("\n")) return;
  const before = select.value;
  select.replaceChildren(...wanted.map((x) => make("option", { value: x }, x || all)));
  select.value = wanted.includes(before) ? before : "";
}

export const labelled = (text, control) => make("label", {}, text, control);
