// The console: one connection to the router, and the view that is open.

import { chatView } from "./chat.js";
import { make, number, setText } from "./dom.js";
import { flowView } from "./flow.js";
import { goodputView } from "./goodput.js";
import { overviewView } from "./overview.js";
import { requestsView } from "./requests.js";
import { sessionsView } from "./sessions.js";
import { State } from "./state.js";
import { events } from "./stream.js";
import { verdictView } from "./verdict.js";
import { workersView } from "./workers.js";

const VIEWS = {
  overview: ["Overview", overviewView],
  requests: ["Requests", requestsView],
  workers: ["Workers", workersView],
  sessions: ["Sessions", sessionsView],
  flow: ["KV flow", flowView],
  goodput: ["Goodput", goodputView],
  verdict: ["Is disaggregation helping?", verdictView],
  chat: ["Chat", chatView],
};
const RETRY_S = 1;
const SILENCE_S = 5; // the router sends four events a second

const app = { state: new State(), key: "", colors: {} };
const status = document.getElementById("status");
const main = document.getElementById("view");
const made = {};
let current = null;
let isDue = false;

function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "overview";
  const [title, open] = VIEWS[name];
  current = made[name] ??= open(app);
  main.replaceChildren(current.root);
  document.title = `${title} – pdserve`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (app.state.hello) current.update();
}

/** Draw in the next frame, once for all events until then. Draws nothing while the page is hidden. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    current.update();
  });
}

/** Ask for the key. It is kept in this page's memory only. */
function askKey(why) {
  const dialog = document.getElementById("ask");
  const input = make("input", { type: "password", name: "key", autocomplete: "off", required: true, "aria-label": "Key" });
  return new Promise((resolve) => {
    const form = make("form", { method: "dialog", onsubmit: () => resolve(input.value.trim()) },
      make("h2", {}, "Administrator's key"), make("p", { class: "lead" }, why),
      make("p", { class: "controls" }, input, make("button", { class: "main" }, "Open")));
    dialog.replaceChildren(form);
    dialog.oncancel = (event) => event.preventDefault();
    dialog.showModal();
    input.focus();
  }).finally(() => { dialog.oncancel = null; });
}

async function connect() {
  const lost = new AbortController();
  let timer = 0;
  for await (const event of events("/console/events", { key: app.key, signal: lost.signal })) {
    clearTimeout(timer);
    timer = setTimeout(() => lost.abort(), SILENCE_S * 1e3);
    if (event.hello) {
      app.state = Object.assign(app.state, new State(), { hello: event.hello });
      document.querySelector("h1").title = `version ${event.hello.version}`;
      continue;
    }
    app.state.apply(event);
    showConnection("live");
    setText(status, `${number(app.state.running)} running, ${number(app.state.queued)} queued`);
    draw();
  }
}

/** Without the router, what the page shows is the past: it turns grey. */
function showConnection(kind) {
  status.className = kind;
  document.body.classList.toggle("stale", kind === "lost" && app.state.hello !== null);
  if (app.state.hello) draw();
}

async function run() {
  for (;;) {
    try {
      await connect();
    } catch (error) {
      showConnection("lost");
      setText(status, error.status ? error.message : "the router does not answer");
      if (error.status === 401 || (error.status === 403 && app.key)) {
        app.key = await askKey(app.key ? `This is not the key of an administrator: ${error.message}` : error.message);
        continue;
      }
      if (error.status === 403) return;
    }
    showConnection("lost");
    if (!status.textContent) setText(status, "not connected");
    await new Promise((resolve) => setTimeout(resolve, RETRY_S * 1e3));
  }
}

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["prefill", "decode", "kv"]) app.colors[name] = style.getPropertyValue(`--${name}`).trim();
}

document.querySelector("nav").append(
  ...Object.entries(VIEWS).map(([name, [title]]) => make("a", { href: `#${name}` }, title)));
readColors();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColors);
addEventListener("hashchange", () => {
  document.getElementById("detail").close();
  show();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
show();
run();
