// A chat with a served model. Each answer draws its own waterfall.

import { labelled, make, natural, number, seconds, setChoices, setText } from "./dom.js";
import { events } from "./stream.js";
import { bar, drawBar, legend } from "./waterfall.js";

const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "Get the weather of a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

export function chatView(app) {
  const { state } = app;
  const model = make("select");
  const key = make("input", { type: "password", autocomplete: "off", size: "20" });
  const text = make("textarea", { "aria-label": "Message", placeholder: "Ask something. Ctrl+Enter sends. Images can be pasted or dropped here." });
  const pictures = make("div", { class: "controls", role: "group", "aria-label": "Images to send" });
  const tools = make("textarea", { "aria-label": "Tools" });
  const example = make("button", { type: "button", onclick: () => { tools.value = JSON.stringify(EXAMPLE, null, 1); } }, "Example");
  const effort = make("select");
  setChoices(effort, ["none", "low", "medium", "high"], "the model's default");
  const limit = make("input", { type: "number", min: "1", value: "256", size: "6" });
  const send = make("button", { class: "main" }, "Send");
  const stop = make("button", { type: "button", disabled: true, onclick: () => open?.abort() }, "Stop");
  const clear = make("button", { type: "button", onclick: () => { messages = []; turns.replaceChildren(); } }, "Clear");
  const turns = make("div", { role: "log", "aria-label": "Conversation" });
  const keyLabel = labelled("Tenant's key", key);
  const form = make("form", { onsubmit: (event) => { event.preventDefault(); question(); } },
    text, pictures, make("details", {}, make("summary", {}, "Tools as JSON"), tools, example),
    make("p", { class: "controls" }, labelled("Model", model), labelled("Reasoning", effort), labelled("Maximum tokens", limit), keyLabel, send, stop, clear));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  text.addEventListener("paste", (event) => addImages(event.clipboardData.files));
  text.addEventListener("dragover", (event) => event.preventDefault());
  text.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    addImages(event.dataTransfer.files);
  });
  const root = make("section", { class: "chat" }, make("h2", {}, "Chat"),
    make("p", { class: "lead" }, "The answer goes through the same API, queue and workers as every other."),
    legend(["queue", "prefill", "hidden", "exposed", "decode", "other"]), turns, form);
  let models = [];
  let messages = [];
  let open = null;

  function update() {
    const named = [...state.workers.values()].filter((x) => !["pooling", "encode"].includes(x.role)).map((x) => x.model);
    models = [...new Set([...named, ...state.onDemand.map((x) => x.model)])].sort(natural);
    setChoices(model, models.slice(1), models[0] ?? "no model is served");
    keyLabel.hidden = !state.hello.needs_key;
  }

  /** Show image files under the message. They are sent with it; a click removes one. */
  function addImages(files) {
    for (const file of [...files].filter((x) => x.type.startsWith("image/"))) {
      const reader = new FileReader();
      reader.addEventListener("load", () => {
        const picture = pictureOf(reader.result);
        picture.title = "Remove";
        picture.addEventListener("click", () => picture.remove());
        pictures.append(picture);
      });
      reader.readAsDataURL(file);
    }
  }

  function question() {
    const asked = text.value.trim();
    const images = [...pictures.children].map((x) => ({ type: "image_url", image_url: { url: x.src } }));
    if (!(asked || images.length) || open) return;
    const content = images.length ? [...images, { type: "text", text: asked }] : asked;
    let given = {};
    try {
      if (tools.value.trim()) given = { tools: JSON.parse(tools.value) };
    } catch (error) {
      turns.append(make("p", { class: "error" }, `Tools: ${error.message}`));
      return;
    }
    if (effort.value) given.reasoning_effort = effort.value;
    text.value = "";
    pictures.replaceChildren();
    ask([{ role: "user", content }], given);
  }

  /** Return a form in which the user enters the results of an answer's tool calls. */
  function resultsOf(calls, given) {
    const inputs = calls.map((x) => make("input", { required: true, placeholder: `result of ${x.function.name}`, "aria-label": `Result of ${x.function.name}` }));
    const found = make("form", { class: "controls", onsubmit: (event) => {
      event.preventDefault();
      if (open) return;
      found.remove();
      ask(calls.map((x, i) => ({ role: "tool", tool_call_id: x.id, content: inputs[i].value })), given);
    } }, ...inputs, make("button", {}, "Send to the model"));
    return found;
  }

  async function ask(sent, given) {
    const turn = turnOf();
    messages.push(...sent);
    turns.append(...sent.map((x) => make("div", { class: "turn user" }, make("div", { class: "text" }, ...shown(x.content)))), turn.root);
    open = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    const body = { messages, stream: true, max_tokens: Number(limit.value) || 256,
      stream_options: { include_usage: true }, ...given, model: model.value || models[0] };
    try {
      await receive(events("/v1/chat/completions", { key: key.value.trim(), body, signal: open.signal }), turn);
    } catch (error) {
      setText(turn.error, error.name === "AbortError" ? "stopped" : error.message);
      if (!turn.line.firstChild) setText(turn.told, "");
    }
    const message = turn.message();
    // Drop a question without an answer from the conversation.
    if (message.content || message.tool_calls) messages.push(message);
    else messages.splice(-sent.length);
    if (message.tool_calls) turn.root.append(resultsOf(message.tool_calls, given));
    open = null;
    send.disabled = false;
    stop.disabled = true;
  }

  return { root, update };
}

const pictureOf = (url) => make("img", { src: url, alt: "Image", height: "80" });

function shown(content) {
  if (typeof content === "string") return [content];
  return content.map((x) => (x.type === "text" ? x.text : pictureOf(x.image_url.url)));
}

function turnOf() {
  const reasoning = make("div", { class: "text" });
  const thought = make("details", { open: true, hidden: true }, make("summary", {}, "Reasoning"), reasoning);
  const answer = make("div", { class: "text" });
  const calls = make("div");
  const error = make("p", { class: "error" });
  const line = bar();
  const told = make("p", { class: "none" }, "waiting for the first token");
  const found = { calls: [], text: "" };
  return {
    root: make("div", { class: "turn" }, thought, answer, calls, error, line, told),
    thought, reasoning, answer, calls, error, line, told, found,
    message: () => ({
      role: "assistant", content: found.text,
      ...(found.calls.length && { tool_calls: found.calls.map(({ node, ...call }) => call) }),
    }),
  };
}

async function receive(stream, turn) {
  const began = performance.now();
  const passed = () => (performance.now() - began) / 1e3;
  const row = { arrived: 0, admitted: 1e-9, ended: 0, first_token_at: 0 };
  let usage;
  for await (const event of stream) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices?.[0]?.delta ?? {};
    if (!row.first_token_at && event.choices?.length) row.ttft_s = row.first_token_at = passed();
    write(turn, delta);
    usage = event.usage ?? usage;
    row.receipt = event.pdserve?.receipt ?? row.receipt;
    if (row.receipt) row.ended = passed();
    drawBar(turn.line, row, passed(), passed());
    setText(turn.told, factsOf(row, usage, passed()));
  }
}

function write(turn, delta) {
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) {
    turn.thought.hidden = false;
    turn.reasoning.append(thought);
  }
  if (delta.content) {
    turn.answer.append(delta.content);
    turn.found.text += delta.content;
  }
  for (const piece of delta.tool_calls ?? []) {
    const call = (turn.found.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" }, node: turn.calls.appendChild(make("pre")) });
    call.id ||= piece.id ?? "";
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    setText(call.node, `calls ${call.function.name}(${call.function.arguments})`);
  }
}

function factsOf(row, usage, total) {
  const parts = [`TTFT ${seconds(row.ttft_s)}`, `total ${seconds(total)}`];
  if (usage) parts.push(`${number(usage.prompt_tokens)} → ${number(usage.completion_tokens)} tokens`);
  const { receipt } = row;
  if (receipt) {
    parts.push([...new Set([receipt.prefill_worker, receipt.decode_worker].filter(Boolean))].join(" → "));
    if (receipt.images) parts.push(`${receipt.images} image(s) rendered in ${seconds(receipt.render_s)}`);
    if (receipt.fetched_tokens) parts.push(`KV of ${receipt.fetched_tokens} tokens copied from ${receipt.fetched_from}`);
    if (receipt.fetched_images) parts.push(`${receipt.fetched_images} encoded by ${receipt.encode_worker} in ${seconds(receipt.encode_s)}`);
    if (receipt.transport) parts.push(`${receipt.transfer_blocks} KV blocks over ${receipt.transport}`);
    if (receipt.fallbacks.length) parts.push(`retries: ${receipt.fallbacks.join(", ")}`);
  }
  return parts.join(" · ");
}
