// The last 15 minutes at a glance: rates, latencies, KV cache and workers, a column for 15 seconds.

import { keep, make, number, percent, quantile, seconds, setText } from "./dom.js";
import { SPAN_S, tpotOf } from "./state.js";

const COLUMNS = 60;
const WIDTH_S = SPAN_S / COLUMNS;
const EVERY_S = 1;

// Of each card: title, colours of its values from the bottom up, how to write one, and the values of a column.
const perSecond = (x) => `${number(x, x < 10 ? 1 : 0)}/s`;
const share = (rows, of, q) => quantile(rows.map(of).filter((x) => x !== undefined).sort((a, b) => a - b), q);
const both = (of) => ({ rows }) => [share(rows, of, 0.5), share(rows, of, 0.9)];
const CARDS = [
  ["Requests that ended", ["decode"], perSecond, ({ rows }) => [rows.length / WIDTH_S]],
  ["Tokens of answers", ["decode"], perSecond, ({ rows }) =>
    [rows.reduce((sum, x) => sum + (x.usage?.completion_tokens ?? 0), 0) / WIDTH_S]],
  ["TTFT, p50 and p90", ["prefill", "queue"], seconds, both((x) => (x.receipt ? x.ttft_s : undefined))],
  ["ITL (mean of an answer), p50 and p90", ["decode", "queue"], seconds, both(tpotOf)],
  ["KV cache in use, mean and fullest", ["kv", "queue"], percent, ({ samples }) => most(samples, ["kv", "fullest"]), true],
  ["Workers that are ready", ["met"], (x) => number(x), ({ samples }) => most(samples.slice(-1), ["ready"]), true],
];
const most = (samples, names) => names.map((x) => (samples.length ? Math.max(...samples.map((s) => s[x])) : undefined));

export function overviewView(app) {
  const { state } = app;
  const cards = make("div", { class: "cards small" });
  const root = make("section", {}, make("h2", {}, "Overview"),
    make("p", { class: "lead" }, "The last 15 minutes of this router. KV cache and workers are recorded since this page was opened."),
    cards);
  let drawnAt = -Infinity;

  function update() {
    if (Math.abs(state.now - drawnAt) < EVERY_S) return;
    drawnAt = state.now;
    const last = Math.floor(state.now / WIDTH_S); // columns keep their bounds over time
    const columns = Array.from({ length: COLUMNS }, () => ({ rows: [], samples: [] }));
    const at = (time) => columns[COLUMNS - 1 - last + Math.floor(time / WIDTH_S)];
    for (const row of state.since(SPAN_S)) at(row.ended)?.rows.push(row);
    for (const sample of state.samples) at(sample.at)?.samples.push(sample);
    keep(cards, CARDS, ([title]) => title, create, (card, [, kinds, write, of, isLive]) => fill(card, kinds, write, columns.map(of), isLive));
  }

  return { root, update };
}

function create([title]) {
  return make("article", { class: "card" }, make("h3", {}, title), make("p", { class: "figure" }),
    make("div", { class: "columns", role: "img" },
      ...Array.from({ length: COLUMNS }, () => make("span"))), make("p", { class: "none" }));
}

function fill(card, kinds, write, values, isLive) {
  const [, now, columns, scale] = card.children;
  // The last column is incomplete, so show the rates of the one before.
  const known = (isLive ? values : values.slice(0, -1)).filter((x) => x[0] !== undefined);
  const text = (known.at(-1) ?? []).map(write).join(" · ") || "–";
  const top = Math.max(0, ...known.map((x) => x.at(-1)));
  setText(now, text);
  columns.setAttribute("aria-label", text);
  setText(scale, known.length ? `highest: ${write(top)}` : "nothing yet");
  values.forEach((of, i) => {
    const column = columns.children[i];
    while (column.children.length < kinds.length) column.append(make("i", { class: kinds[column.children.length] }));
    of.forEach((value, j) => {
      const below = j ? (of[j - 1] ?? 0) : 0;
      column.children[j].style.height = `${top ? (100 * Math.max(0, (value ?? 0) - below)) / top : 0}%`;
    });
  });
}
