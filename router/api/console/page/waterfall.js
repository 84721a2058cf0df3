// The phases of one request as bars on a timeline.

import { make, seconds } from "./dom.js";
import { fateOf, receiptOf } from "./state.js";

export const PHASES = {
  queue: "queue", prefill: "prefill", hidden: "KV transfer during prefill",
  exposed: "KV transfer, waited for", decode: "decode", other: "other", aborted: "aborted by the client", failed: "failed",
};

/** Return [phase, from, to] in seconds since the request arrived. */
export function segments(row, now) {
  const total = (row.ended || now) - row.arrived;
  const receipt = receiptOf(row);
  if (!receipt) {
    const admitted = row.admitted ? row.admitted - row.arrived : total;
    const first = row.first_token_at ? row.first_token_at - row.arrived : total;
    if (row.ended) return [["queue", 0, admitted], [fateOf(row) === "aborted" ? "aborted" : "failed", admitted, Math.max(total, admitted)]];
    return [["queue", 0, admitted], ["prefill", admitted, first], ["decode", first, total]];
  }
  const queue = Math.min(total, receipt.queue_s);
  const prefill = Math.min(total, queue + receipt.prefill_s);
  const exposed = Math.min(total, prefill + receipt.exposed_transfer_s);
  const decode = Math.max(exposed, total - receipt.decode_s);
  const hidden = Math.max(queue, prefill - Math.max(0, receipt.transfer_s - receipt.exposed_transfer_s));
  const found = [
    ["queue", 0, queue], ["prefill", queue, prefill], ["hidden", hidden, prefill],
    ["exposed", prefill, exposed], ["other", exposed, decode], ["decode", decode, total],
  ];
  // The phase in which an answer was interrupted has the colour of its outcome.
  if (!row.receipt && row.ended) found.findLast(([, from, to]) => to > from)?.splice(0, 1, fateOf(row));
  return found;
}

export const bar = () => make("div", { class: "bar" });

/** Fill a bar that is `span` seconds wide. Returns a description of its phases. */
export function drawBar(node, row, now, span) {
  const found = segments(row, now).filter(([, from, to]) => to > from);
  while (node.children.length > found.length) node.lastChild.remove();
  found.forEach(([phase, from, to], i) => {
    const part = node.children[i] ?? node.appendChild(make("i"));
    if (part.className !== phase) part.className = phase;
    part.style.left = `${(100 * from) / span}%`;
    part.style.width = `${(100 * (to - from)) / span}%`;
  });
  node.classList.toggle("cut", found.some(([, , to]) => to > span * 1.001));
  const words = found.map(([phase, from, to]) => `${PHASES[phase]}: ${seconds(to - from)}`);
  node.title = words.join("\n");
  return words;
}

export const legend = (phases = Object.keys(PHASES)) =>
  make("ul", { class: "legend", "aria-label": "Colours" },
    ...phases.map((x) => make("li", {}, make("i", { class: x }), PHASES[x])));
