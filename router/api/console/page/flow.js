// KV flow: how much KV each prefill worker sent to each decode worker, and how fast.

import { bytes, make, natural, number, quantile, seconds, table } from "./dom.js";

const SPAN_S = 60;
const EVERY_S = 1;

export function flowView(app) {
  const { state } = app;
  const place = make("div");
  const root = make("section", {},
    make("h2", {}, "KV flow"),
    make("p", { class: "lead" },
      `KV that moved from prefill workers (rows) to decode workers (columns) for the requests that ended in the last ${SPAN_S} seconds: `,
      "bytes a second, the median time of a transfer and how much of it was waited for. An ejected pair gets no requests."),
    place);
  let drawnAt = -1;

  function update() {
    if (state.now - drawnAt < EVERY_S) return;
    drawnAt = state.now;
    const rows = state.since(SPAN_S).filter((x) => x.receipt);
    const pairs = new Map();
    for (const { receipt } of rows.filter((x) => x.receipt.transport)) {
      const name = keyOf(receipt.prefill_worker, receipt.decode_worker);
      if (!pairs.has(name)) pairs.set(name, []);
      pairs.get(name).push(receipt);
    }
    const alone = rows.filter((x) => !x.receipt.transport).length;
    place.replaceChildren(matrix(pairs), make("p", { class: "lead" },
      `${number(rows.length - alone)} requests moved KV, ${number(alone)} ran without a transfer.`));
  }

  function matrix(pairs) {
    const named = (role) => [...state.workers.values()].filter((x) => x.role === role).map((x) => x.id);
    const used = [...pairs.keys(), ...state.pairs.map((x) => keyOf(x.prefill, x.decode))].map((x) => JSON.parse(x));
    const unique = (names) => [...new Set(names)].sort(natural);
    const rows = unique([...named("prefill"), ...used.map((x) => x[0])]);
    const columns = unique([...named("decode"), ...used.map((x) => x[1])]);
    if (!rows.length || !columns.length) {
      return make("p", { class: "none" }, "There are no prefill and decode workers, so no KV moves.");
    }
    const volume = (found = []) => found.reduce((sum, x) => sum + x.transfer_bytes, 0) / SPAN_S;
    const most = Math.max(1, ...[...pairs.values()].map(volume));
    const found = table("KV from prefill to decode workers", ["from \\ to", ...columns.map(headOf)], rows.map((from) =>
      [headOf(from), ...columns.map((to) => cellOf(pairs.get(keyOf(from, to)), pairOf(from, to), volume))]), { class: "flow" });
    found.querySelectorAll("tbody tr").forEach((line, i) => line.querySelectorAll("td").forEach((cell, j) => {
      const receipts = pairs.get(keyOf(rows[i], columns[j]));
      cell.style.setProperty("--heat", (60 * volume(receipts)) / most);
      cell.classList.toggle("idle", !receipts);
      cell.classList.toggle("ejected", Boolean(pairOf(rows[i], columns[j])?.ejected));
    }));
    return found;
  }

  const pairOf = (from, to) => state.pairs.find((x) => x.prefill === from && x.decode === to);

  function headOf(name) {
    const failures = state.workers.get(name)?.failures;
    return failures ? make("span", {}, name, make("small", { class: "error" }, `${number(failures)} failed transfers`)) : name;
  }

  return { root, update };
}

const keyOf = (from, to) => JSON.stringify([from, to]);

function cellOf(receipts, pair, volume) {
  const parts = [];
  if (receipts) {
    const sorted = (field) => receipts.map((x) => x[field]).sort((a, b) => a - b);
    const transports = [...new Set(receipts.map((x) => x.transport))].join(", ");
    parts.push(make("b", {}, `${bytes(volume(receipts))}/s`),
      make("small", {}, `${seconds(quantile(sorted("transfer_s"), 0.5))}, waited ${seconds(quantile(sorted("exposed_transfer_s"), 0.5))}`),
      make("small", {}, `${number(receipts.length)} over ${transports}`));
  } else {
    parts.push("–");
  }
  if (pair?.failures) {
    const what = pair.ejected ? "ejected" : `${pair.failures} failed in a row`;
    parts.push(make("small", { class: "error" }, `${what}: ${pair.reason}`));
  }
  return make("span", {}, ...parts);
}
