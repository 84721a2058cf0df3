// Actions of an administrator on a worker. Each asks for confirmation and shows its progress.

import { make, seconds, setText } from "./dom.js";
import { events } from "./stream.js";

const OTHER = { prefill: "decode", decode: "prefill" };

/** Return the buttons of a worker. */
export function actionsFor(app, worker) {
  const button = (text, path, body, question, title = `${text} ${worker.id}`) =>
    make("button", { type: "button", onclick: () => confirm(app, text, title, question, path, body) }, text);
  const body = { worker_id: worker.id };
  if (["lost", "left", "crash-looping", "connecting"].includes(worker.state)) return [];
  if (worker.state === "draining") {
    return [button("Undrain", "undrain", body, "It accepts requests again.")];
  }
  const found = [button("Drain", "drain", body,
    "It accepts no new requests. Streams that have not ended in 30 s move to other workers.")];
  const role = OTHER[worker.role];
  if (role) {
    found.push(button(`Make it ${role}`, "role", { ...body, role },
      "It drains, changes its role and is probed. If the probe fails, it keeps its old role.",
      `Make ${worker.id} a ${role} worker`));
  }
  return found;
}

function confirm(app, text, title, question, path, body) {
  const dialog = document.getElementById("ask");
  const told = make("p", { role: "status" });
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const go = make("button", { type: "button", class: "main", onclick: async () => {
    go.disabled = true;
    setText(close, "Close");
    setText(told, "begun");
    try {
      for await (const event of events(`/console/${path}`, { key: app.key, body })) setText(told, wordsOf(event));
    } catch (error) {
      told.className = "error";
      setText(told, error.message);
    }
  } }, text);
  dialog.replaceChildren(make("h2", {}, title), make("p", {}, question), told,
    make("p", { class: "controls" }, go, close));
  dialog.showModal();
}

function wordsOf(event) {
  if (event.failure) return `failed: ${event.failure}`;
  const left = event.open_streams === undefined ? "" : `${event.open_streams} streams and ${event.pinned_blocks} KV blocks are left`;
  if (!event.done) return left;
  const moved = event.moved_streams ? `, ${event.moved_streams} streams were moved` : "";
  if (event.drained === false) return `not drained: ${left}`;
  return `done${event.total_s ? ` in ${seconds(event.total_s)}` : ""}${moved}`;
}
