// The live waterfall of requests, and the details of one request.

import { bytes, keep, labelled, make, number, seconds, setChoices, setText, table } from "./dom.js";
import { fateOf, receiptOf } from "./state.js";
import { read } from "./stream.js";
import { bar, drawBar, legend } from "./waterfall.js";

const SHOWN = 50;
const LIST_EVERY_S = 1; // models and tenants to choose from

export function requestsView(app) {
  const { state } = app;
  const model = make("select");
  const tenant = make("select");
  const fate = make("select");
  const order = make("select", {},
    make("option", { value: "newest" }, "newest first"), make("option", { value: "slowest" }, "slowest first"));
  setChoices(fate, ["queued", "running", "finished", "aborted", "failed", "refused"], "all outcomes");
  const id = make("input", { type: "search", placeholder: "part of an id", oninput: () => update() });
  const pause = make("button", { type: "button", "aria-pressed": "false", onclick: () => {
    const isPaused = pause.getAttribute("aria-pressed") === "true";
    pause.setAttribute("aria-pressed", String(!isPaused));
    setText(pause, isPaused ? "Pause" : "Continue");
    frozen = isPaused ? null : state.clock();
    if (isPaused) update();
  } }, "Pause");
  let frozen = null;
  let listedAt = -Infinity;
  const body = make("tbody");
  const caption = make("caption");
  const head = (text, kind = "") => make("th", { scope: "col", class: kind }, text);
  const axis = head("");
  const list = make("table", { class: "waterfall" }, caption,
    make("thead", {}, make("tr", {}, head("Arrived"), head("Request", "word"), head("Model", "wide word"),
      head("Tenant", "wide word"), head("Workers", "wide word"), head("Tokens", "wide"), head("TTFT"), head("Total"), axis)),
    body);
  const root = make("section", {},
    make("h2", {}, "Requests"),
    make("p", { class: "lead" },
      "Each line is a request from its arrival to its last token. The KV cache crosses from the prefill to the ",
      "decode worker while prefill runs; only what is left when prefill ends is waited for."),
    make("div", { class: "controls" }, labelled("Model", model), labelled("Tenant", tenant),
      labelled("Outcome", fate), labelled("Order", order), labelled("Id", id), pause),
    legend(),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" }, list));
  for (const control of [model, tenant, fate, order]) control.addEventListener("change", () => update());

  function matching() {
    const [ofModel, ofTenant, ofFate] = [model.value, tenant.value, fate.value];
    const wanted = id.value.trim();
    const fits = (row) => (!ofModel || row.model === ofModel) && (!ofTenant || row.tenant === ofTenant)
      && (!ofFate || fateOf(row) === ofFate)
      && (!wanted || row.id.includes(wanted) || row.trace_id?.includes(wanted));
    const rows = [...state.open.values(), ...state.ended].filter(fits);
    const length = (row) => (row.ended || state.now) - row.arrived;
    rows.sort(order.value === "slowest" ? (a, b) => length(b) - length(a) : (a, b) => b.n - a.n);
    return rows;
  }

  function update() {
    if (frozen !== null) return;
    const now = state.clock();
    if (now - listedAt > LIST_EVERY_S) {
      listedAt = now;
      const models = state.values("model");
      setChoices(model, models, "all models");
      list.classList.toggle("one-model", models.length < 2);
      setChoices(tenant, state.values("tenant"), "all tenants");
    }
    const rows = matching();
    const shown = rows.slice(0, SHOWN);
    const span = axisOf(shown.map((x) => (x.ended || now) - x.arrived).sort((a, b) => a - b));
    setText(caption, `${number(shown.length)} of ${number(rows.length)} requests`);
    setText(axis, `0 – ${seconds(span)}`);
    keep(body, shown, (x) => x.n, createRow, (node, row) => updateRow(node, row, now, span));
  }

  function createRow(row) {
    const name = row.id.replace(/^(chatcmpl|cmpl)-/, "");
    const open = make("button", { class: "plain", type: "button", title: row.id, onclick: () => showRequest(app, row.n) }, name);
    const cell = (kind = "") => make("td", { class: kind });
    return make("tr", {}, make("td", { title: String(state.date(row.arrived)) }, state.date(row.arrived).toLocaleTimeString("en-GB")),
      make("td", { class: "id" }, open), make("td", { class: "wide word" }, row.model), make("td", { class: "wide word" }, row.tenant || "–"),
      cell("wide word"), cell("wide"), cell(), cell(), make("td", {}, bar(), make("div", { class: "marks" })));
  }

  function updateRow(node, row, now, span) {
    const [, , , , workers, tokens, ttft, total, line] = node.children;
    const first = row.first_token_at ? row.first_token_at - row.arrived : row.ttft_s;
    const made = row.usage ? ` → ${number(row.usage.completion_tokens)}` : "";
    setText(workers, pathOf(row).join(" → ") || "–");
    setText(tokens, `${number(row.prompt_tokens)}${made}`);
    setText(ttft, seconds(first || undefined));
    setText(total, seconds((row.ended || now) - row.arrived));
    drawBar(line.firstChild, row, now, span);
    const marks = marksOf(row);
    if (line.dataset.marks === marks.join()) return;
    line.dataset.marks = marks.join();
    line.lastChild.replaceChildren(...marks.map((x) => make("span", { class: `mark ${fateOf(row)}` }, x)));
  }

  return { root, update };
}

/** Return the seconds of the axis: a few very long requests must not shrink the bars of all others to nothing. */
function axisOf(lengths) {
  const usual = lengths[Math.floor(0.75 * (lengths.length - 1))];
  return niceSpan(Math.min(lengths.at(-1), 2 * usual));
}

const niceSpan = (s = 1) => {
  const unit = 10 ** Math.floor(Math.log10(Math.max(s, 1e-3)));
  return unit * [1, 2, 5, 10].find((x) => x * unit >= s * 0.999);
};

/** Return the workers that a request used, in order. */
function pathOf(row) {
  const receipt = receiptOf(row);
  if (row.path?.length > 2 || !receipt) return [...new Set(row.path ?? [])];
  const { prefill_worker: prefill, decode_worker: decode } = receipt;
  return [...new Set([prefill, decode].filter(Boolean))];
}

function marksOf(row) {
  const retries = (row.receipt?.fallbacks ?? []).map((x) => `↻ ${x}`);
  const fate = fateOf(row);
  if (fate === "aborted") return [fate];
  return fate === "finished" || fate === "running" ? retries : [row.reason || row.outcome || fate];
}

/** Open the dialog with the details of a request. */
async function showRequest(app, n) {
  const { state } = app;
  const row = state.open.get(n) ?? state.ended.findLast((x) => x.n === n);
  const dialog = document.getElementById("detail");
  if (!row) return;
  const line = bar();
  const words = drawBar(line, row, state.clock(), (row.ended || state.clock()) - row.arrived);
  const why = make("div", {}, make("p", { class: "none" }, "reading the decisions"));
  dialog.replaceChildren(
    make("button", { class: "close", type: "button", onclick: () => dialog.close() }, "Close"),
    make("h2", {}, row.id), make("p", { class: "lead" }, summaryOf(row)), line,
    make("ul", { class: "legend" }, ...words.map((x) => make("li", {}, x))),
    make("h3", {}, "Receipt"), factsOf(row), make("h3", {}, "Why it ran there"), why);
  dialog.showModal();
  try {
    why.replaceChildren(...wordsOf(await read(`/console/requests/${encodeURIComponent(row.id)}`, app.key)));
  } catch (error) {
    why.replaceChildren(make("p", { class: "none" }, error.status === 404 ? "Its placement decisions are no longer kept." : error.message));
  }
}

function summaryOf(row) {
  const who = row.tenant ? ` of tenant ${row.tenant}` : "";
  const how = fateOf(row) === "aborted" ? "its client left" : row.outcome ? `ended: ${row.outcome}` : fateOf(row);
  return `${row.class} request${who} to ${row.model}; ${how}${row.message ? `: ${row.message}` : ""}`;
}

const UNIT = /_(s|j|bytes)$/;

function factsOf(row) {
  const facts = { trace_id: row.trace_id || "not traced", session: row.session || "none", recomputed_tokens: row.recomputed_tokens ?? 0, ...row.usage, ...receiptOf(row) };
  delete facts.model_choice; // it is among the decisions
  // Omit phases that the request did not have, and unmeasured values.
  const known = Object.entries(facts).filter(([name, x]) => x !== null && x !== "" && x?.length !== 0 && !(x === 0 && UNIT.test(name)));
  const shown = known.map(([name, value]) => {
    const inUnit = { s: seconds, j: (x) => `${number(x, 3)} J`, bytes }[name.match(UNIT)?.[1]];
    const text = inUnit ? inUnit(value) : typeof value === "number" ? number(value, 6) : [].concat(value).join(", ");
    return make("div", {}, make("dt", {}, name.replace(UNIT, "").replaceAll("_", " ")), make("dd", {}, text));
  });
  return make("dl", {}, ...shown);
}

function wordsOf(found) {
  return [...found.choices.map((text) => make("p", {}, text)), ...found.decisions.flatMap((x, i) => [
    make("h3", {}, `${i + 1}. ${new Date(x.unix_time_s * 1e3).toLocaleTimeString("en-GB")} ${x.policy ? `${x.policy}: ` : ""}${x.outcome}`),
    ...x.details.map((text) => make("p", {}, text)),
    table("Workers as the router saw them", ["worker", "prompt tokens", "KV blocks", "run+wait", "total", "scores, or why not"],
      x.candidates.map((c) => [c.chosen ? make("b", {}, c.worker) : c.worker, number(c.prompt_tokens), c.blocks,
        c.requests || "–", c.total === null ? "–" : c.total.toFixed(3), c.scores]), {}, { textAt: 5 }),
    ...x.predictions.map((text) => make("p", { class: "none" }, text)),
  ])];
}
