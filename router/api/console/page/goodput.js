// Goodput: share of requests that met their targets, by tenant, and reasons of refusals.

import { labelled, make, number, percent, quantile, seconds, setChoices, table } from "./dom.js";
import { SPAN_S, fateOf, metSlo, tpotOf } from "./state.js";

const COLUMNS = 60;
const EVERY_S = 1;
const COSTS = { cost: ["cost", "per 1M out"], energy_j: ["J", "J per 1k out"] };

export function goodputView(app) {
  const { state } = app;
  const model = make("select", { onchange: () => redraw() });
  const tenant = make("select", { onchange: () => redraw() });
  const place = make("div");
  const lead = make("p", { class: "lead" });
  const root = make("section", {}, make("h2", {}, "Goodput"), lead,
    make("div", { class: "controls" }, labelled("Model", model), labelled("Tenant", tenant)), place);
  let drawnAt = -1;

  function update() {
    if (state.now - drawnAt >= EVERY_S) redraw();
  }

  function redraw() {
    drawnAt = state.now;
    setChoices(model, state.values("model"), "all models");
    setChoices(tenant, state.values("tenant"), "all tenants");
    const { slo, kept } = state.hello;
    const rows = state.since(SPAN_S).filter((x) =>
      (!model.value || x.model === model.value) && (!tenant.value || x.tenant === tenant.value));
    const from = state.ended.length >= kept ? Math.max(state.now - SPAN_S, state.ended[0].ended) : state.now - SPAN_S;
    lead.textContent = `Requests that ended since ${state.date(from).toLocaleTimeString("en-GB")}. `
      + `A request is good if its first token came within ${seconds(slo.ttft_s)} and each further one within ${seconds(slo.tpot_s)} on average; of aborted requests, only the first token counts.`;
    const costs = ["cost", "energy_j"].filter((name) => rows.some((x) => typeof x.receipt?.[name] === "number"));
    place.replaceChildren(
      columns(rows, slo, state.now), table("By tenant and class",
        ["tenant", "class", "requests", "good", "TTFT met", "TPOT met", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99",
          "refused", "failed", "aborted", ...costs.flatMap((name) => COSTS[name])],
        groups(rows).map(([, of]) => [...summary(of, slo), ...costs.flatMap((name) => costOf(of, name))]), {}, { words: 2 }),
      make("h3", {}, "Refused and failed"), reasons(rows));
  }

  return { root, update };
}

function groups(rows) {
  const found = new Map();
  for (const row of rows) {
    const name = JSON.stringify([row.tenant, row.class]);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(row);
  }
  const sorted = [...found].sort(([a], [b]) => (a < b ? -1 : 1));
  return sorted.length > 1 ? [["", rows], ...sorted] : sorted;
}

/** Return true if a client left before a first token was due: neither good nor bad. */
const isUnjudged = (row) => fateOf(row) === "aborted" && row.ttft_met === undefined;

function summary(rows, slo) {
  const sorted = (values) => Float64Array.from(values.filter((x) => x !== undefined)).sort();
  const answered = rows.filter((x) => x.receipt);
  const ttft = sorted(answered.map((x) => x.ttft_s));
  const tpot = sorted(answered.map(tpotOf));
  const share = (values, limit) => percent(values.filter((x) => x <= limit).length / values.length);
  const same = (field) => (new Set(rows.map((x) => x[field])).size === 1 ? rows[0][field] || "–" : "all");
  const fates = rows.map(fateOf);
  const count = (fate) => number(fates.filter((x) => x === fate).length);
  return [
    same("tenant"), same("class"), number(rows.length),
    percent(rows.filter((x) => metSlo(x, slo)).length / rows.filter((x) => !isUnjudged(x)).length), share(ttft, slo.ttft_s), share(tpot, slo.tpot_s),
    ...[ttft, tpot].flatMap((values) => [0.5, 0.9, 0.99].map((q) => seconds(quantile(values, q)))),
    count("refused"), count("failed"), count("aborted"),
  ];
}

/** Return the sum of a field of the receipts, and the sum per million (cost) or thousand tokens. */
function costOf(rows, name) {
  const known = rows.filter((x) => typeof x.receipt?.[name] === "number");
  const sum = known.reduce((total, x) => total + x.receipt[name], 0);
  const tokens = known.reduce((total, x) => total + x.usage.completion_tokens, 0);
  return [number(sum, 4), tokens ? number((sum / tokens) * (name === "cost" ? 1e6 : 1e3), 2) : "–"];
}

function columns(rows, slo, now) {
  const width = SPAN_S / COLUMNS;
  const counts = Array.from({ length: COLUMNS }, () => ({ met: 0, missed: 0, aborted: 0, refused: 0 }));
  for (const row of rows) {
    const at = COLUMNS - 1 - Math.min(COLUMNS - 1, Math.floor((now - row.ended) / width));
    counts[at][isUnjudged(row) ? "aborted" : metSlo(row, slo) === undefined ? "refused" : metSlo(row, slo) ? "met" : "missed"]++;
  }
  const most = Math.max(1, ...counts.map((x) => x.met + x.missed + x.aborted + x.refused));
  const good = rows.filter((x) => metSlo(x, slo)).length;
  return make("div", { class: "card" },
    make("div", { class: "columns", role: "img", "aria-label": `${good} of ${rows.filter((x) => !isUnjudged(x)).length} requests were good` },
      ...counts.map((x) => make("span", {}, ...Object.entries(x).map(([kind, n]) => {
        const part = make("i", { class: kind });
        part.style.height = `${(100 * n) / most}%`;
        return part;
      })))),
    make("ul", { class: "legend" },
      ...[["met", "good"], ["missed", "late"], ["aborted", "aborted before a first token was due: not counted"], ["refused", "refused or failed"]].map(([kind, text]) =>
        make("li", {}, make("i", { class: kind }), text)),
      make("li", {}, `15 minutes, at most ${number(most)} requests in ${width} s`)));
}

function reasons(rows) {
  const counts = new Map();
  for (const row of rows.filter((x) => ["refused", "failed"].includes(fateOf(x)))) {
    const name = JSON.stringify([row.tenant || "–", row.class, row.outcome, row.reason ?? "–", fateOf(row)]);
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  if (!counts.size) return make("p", { class: "none" }, "None.");
  const sorted = [...counts].sort((a, b) => b[1] - a[1]);
  return table("By tenant, class and reason", ["tenant", "class", "error", "reason", "result", "requests"],
    sorted.map(([name, n]) => [...JSON.parse(name), number(n)]), {}, { words: 5 });
}
