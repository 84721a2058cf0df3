// Is disaggregation helping? The cost model's prediction for disaggregated and aggregated workers.

import { keep, make, number, seconds } from "./dom.js";
import { tpotOf } from "./state.js";


export function verdictView(app) {
  const { state } = app;
  const cards = make("div", { class: "cards" });
  const root = make("section", {},
    make("h2", {}, "Is disaggregation helping?"),
    make("p", { class: "lead" },
      "The router predicts the latency of the last requests on the current workers and on the same number of aggregated ",
      "workers, from measured engine steps. The targets determine the weights of TTFT and TPOT."),
    cards);

  function update() {
    keep(cards, state.models, (x) => x.name, () => make("article", {}), fill);
    if (!state.models.length) cards.replaceChildren(make("p", { class: "none" }, "No worker is registered."));
  }

  function fill(card, model) {
    const text = JSON.stringify(model);
    if (card.shown === text) return;
    card.shown = text;
    const answered = state.since(60).filter((x) => x.model === model.name && x.receipt);
    card.className = `card verdict ${model.verdict ?? ""}`;
    card.replaceChildren(make("h2", {}, `${model.name}: ${model.verdict ?? "not known yet"}`),
      ...(model.verdict === null
        ? [make("p", {}, "Not enough measurements: this needs prefill and decode workers, and some requests through both.")]
        : [compare("TTFT", "ttft_s", model), compare("TPOT", "tpot_s", model), make("p", {}, `${model.advice}.`)].flat()),
      measured(answered), ...roles(model.roles));
  }

  return { root, update };
}

function compare(title, field, { split, aggregated }) {
  const values = [["with disaggregation", split], ["aggregated", aggregated]];
  const most = Math.max(...values.map(([, x]) => x?.[field] ?? 0), 1e-9);
  return [make("h3", {}, `${title}, predicted mean`), ...values.map(([name, x], i) => {
    const part = make("i", { class: i ? "aggregated" : "decode" });
    part.style.width = `${x ? (100 * x[field]) / most : 100}%`;
    return make("div", { class: "compare" }, make("span", {}, name), make("div", { class: "bar" }, part),
      make("span", {}, x ? seconds(x[field]) : "overload"));
  })];
}

function measured(rows) {
  const mean = (values) => {
    const known = values.filter((x) => x !== undefined);
    return seconds(known.reduce((sum, x) => sum + x, 0) / known.length);
  };
  return make("p", { class: "none" },
    `Measured in the last minute: ${number(rows.length)} requests, mean TTFT ${mean(rows.map((x) => x.ttft_s))}, TPOT ${mean(rows.map(tpotOf))}.`);
}

function roles(found) {
  if (!found) return [];
  const lines = ["prefill", "decode"].map((role) => {
    const { workers, load, wanted } = found[role];
    const part = make("i", { class: role });
    part.style.width = `${Math.min(100, 100 * (load ?? 0))}%`;
    return make("div", { class: "compare" }, make("span", {}, `${workers} ${role}, ${wanted} wanted`),
      make("div", { class: "bar" }, part), make("span", {}, load === null ? "–" : `load ${load.toFixed(2)}`));
  });
  return [make("h3", {}, "Roles by load"), ...lines, make("p", { class: "none" }, `${found.text}.`)];
}
