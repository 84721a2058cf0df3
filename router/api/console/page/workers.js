// One lane per worker: engine steps as bars, KV usage as a band.

import { bytes, keep, make, natural, percent, seconds, setText } from "./dom.js";
import { actionsFor } from "./actions.js";

const WINDOW_S = 12;
const LAG_S = 0.9; // steps are reported twice a second, so newer ones may be missing
const HEIGHT = 52;
const KV_HEIGHT = 14;
const ROLES = ["prefill", "decode", "aggregated", "pooling", "encode"];

export function workersView(app) {
  const { state } = app;
  const lanes = make("div", { class: "scroll lanes" });
  const onDemand = make("ul", { class: "legend", "aria-label": "Models that are started on demand" });
  const root = make("section", {},
    make("h2", {}, "Workers"),
    make("p", { class: "lead" }, `The last ${WINDOW_S} seconds, drawn four times a second. A bar is an engine step: as wide as it took, as high as it had tokens.`),
    make("ul", { class: "legend", "aria-label": "Colours" },
      ...[["prefill", "prompt tokens"], ["decode", "decode tokens"], ["kv", "KV cache in use"]].map(
        ([kind, text]) => make("li", {}, make("i", { class: kind }), text))),
    onDemand, lanes);
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const x of entries) x.isIntersecting ? visible.add(x.target) : visible.delete(x.target);
  });

  function update() {
    keep(onDemand, state.onDemand, (x) => x.model, () => make("li"), (line, x) => setText(line, `${x.model}: ${x.text}`));
    const width = lanes.querySelector(".track")?.clientWidth ?? 0;
    const order = [...state.workers.values()].sort(
      (a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || natural(a.id, b.id));
    keep(lanes, order, (x) => x.id, createLane, updateLane);
    const right = state.clock() - LAG_S;
    for (const lane of visible) {
      const worker = state.workers.get(lane.worker);
      if (worker && width) draw(lane.canvas, worker, right, width, app.colors);
    }
  }

  function createLane(worker) {
    const canvas = make("canvas", { role: "img" });
    const lane = make("div", { class: "lane", "data-worker": worker.id },
      make("div", {},
        make("b", {}, worker.id), make("span", { class: "mark" }), make("small"), make("small"), make("small"),
        make("small", { class: "why" }), make("div", { class: "acts" })),
      make("div", { class: "track" }, canvas));
    lane.canvas = canvas;
    lane.worker = worker.id;
    observer.observe(lane);
    return lane;
  }

  function updateLane(lane, worker) {
    const [, mark, what, load, gpus, why, acts] = lane.firstChild.children;
    const shown = document.body.classList.contains("stale") ? "not known" : worker.state;
    setText(mark, shown);
    mark.className = `mark ${shown.replace(" ", "-")}`;
    const running = worker.running === undefined ? "no report" : `${worker.running} running, ${worker.waiting} waiting`;
    setText(what, [worker.role, worker.model, worker.where].filter(Boolean).join(", "));
    setText(load, `${running}, KV ${percent(worker.kv_usage)}`);
    setText(gpus, worker.gpus.map(gpuText).join("; "));
    setText(why, worker.reason);
    const kind = `${worker.state} ${worker.role}`;
    if (!state.hello.read_only && acts.dataset.kind !== kind) {
      acts.dataset.kind = kind;
      acts.replaceChildren(...actionsFor(app, worker));
    }
    lane.canvas.setAttribute("aria-label", laneText(worker, state.now));
  }

  return { root, update };
}

function draw(canvas, worker, right, width, colors) {
  const scale = window.devicePixelRatio || 1;
  const pixels = Math.round(width * scale);
  if (canvas.width !== pixels) {
    canvas.width = pixels;
    canvas.height = Math.round(HEIGHT * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, HEIGHT);
  const x = (at) => width + ((at - right) / WINDOW_S) * width;
  drawUsage(context, worker.usage, x, colors);
  drawSteps(context, worker.steps, x, colors);
}

function drawUsage(context, usage, x, colors) {
  if (!usage.length) return;
  context.fillStyle = colors.kv;
  context.globalAlpha = 0.5;
  context.beginPath();
  context.moveTo(x(usage[0][0]), HEIGHT);
  for (const [at, share] of usage) context.lineTo(x(at), HEIGHT - 1 - share * (KV_HEIGHT - 1));
  context.lineTo(x(usage.at(-1)[0]), HEIGHT);
  context.fill();
  context.globalAlpha = 1;
}

function drawSteps(context, steps, x, colors) {
  const room = HEIGHT - KV_HEIGHT - 4;
  // Heights grow with the square root, so that steps of 8 tokens are visible next to prompts of 2,000.
  const most = Math.sqrt(steps.reduce((best, s) => Math.max(best, s[2] + s[3]), 16));
  let left = -1;
  for (const [ended, took, prompt, reqs] of steps) {
    const end = x(ended);
    const from = Math.max(x(ended - took), left);
    if (end < 0 || end - left < 1) continue; // less than a pixel
    left = end;
    const size = Math.max(1, end - from - (end - from > 3 ? 1 : 0));
    const height = (Math.sqrt(prompt + reqs) / most) * room;
    const decode = height * (reqs / Math.max(1, prompt + reqs));
    context.fillStyle = colors.decode;
    context.fillRect(from, room + 2 - decode, size, decode);
    context.fillStyle = colors.prefill;
    context.fillRect(from, room + 2 - height, size, height - decode);
  }
}

function laneText(worker, now) {
  const recent = worker.steps.filter((x) => x[0] > now - 5);
  const sum = (i) => recent.reduce((total, x) => total + x[i], 0);
  const took = recent.length ? `, ${seconds(sum(1) / recent.length)} each` : "";
  return `${worker.id}: ${recent.length} steps in 5 s${took}, ${sum(2)} prompt tokens, ${sum(3)} decode tokens`;
}

function gpuText(gpu) {
  const parts = [`GPU ${gpu.index}: ${gpu.temperature_c} °C`, `${gpu.utilization_percent} %`, `${Math.round(gpu.power_w)} W`];
  parts.push(`${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`);
  if (gpu.throttled_by) parts.push(`throttled by ${gpu.throttled_by}`);
  return parts.join(", ");
}
