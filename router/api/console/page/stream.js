// Server-sent events over fetch: EventSource cannot send a key, and a key in a URL would be logged.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headersOf = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function ask(path, key, body, signal) {
  const headers = headersOf(key);
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
  });
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw new Refused(response.status, found.error?.message ?? `HTTP status ${response.status}`);
}

/** Return the JSON at a path. Throws Refused. */
export const read = async (path, key) => (await ask(path, key)).json();

/** Yield the data of each event. With a `body`, sends a POST. Throws Refused. */
export async function* events(path, { key = "", body, signal } = {}) {
  const response = await ask(path, key, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((x) => x.startsWith("data: ")).map((x) => x.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
