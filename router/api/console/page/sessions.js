// Sessions: conversations of clients, with the tokens that their turns computed again.

import { make, number, percent, seconds, table } from "./dom.js";

const EVERY_S = 1;

export function sessionsView(app) {
  const { state } = app;
  const place = make("div");
  const lead = make("p", { class: "lead" });
  const root = make("section", {}, make("h2", {}, "Sessions"), lead, place);
  let drawnAt = -1;

  function update() {
    if (state.now - drawnAt < EVERY_S) return;
    drawnAt = state.now;
    const { rows, count } = state.sessions;
    lead.textContent = "A session is a conversation that a client names. Cached: share of its prompt tokens that workers had; "
      + "computed again: tokens of a turn that were not cached for the next one. "
      + (count > rows.length ? `The last ${number(rows.length)} of ${number(count)} are shown.` : "");
    place.replaceChildren(rows.length
      ? table("Sessions", ["session", "tenant", "model", "workers", "turns", "prompt tokens", "cached", "computed again", "last answer"],
        rows.map(line), { class: "sessions" }, { words: 4 })
      : make("p", { class: "none" }, "No client has named a session with the header x-session-id or an agent's session id."));
  }

  function line(x) {
    return [make("span", { class: "name", title: x.id }, x.id), x.tenant || "–", x.adapter ? `${x.model}, ${x.adapter}` : x.model, x.workers.join(", "),
      number(x.turns), number(x.prompt_tokens), percent(x.cached_tokens / x.prompt_tokens), number(x.recomputed_tokens),
      `${seconds(Math.max(0, state.now - x.used))} ago`];
  }

  return { root, update };
}
