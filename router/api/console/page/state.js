// State that the router has sent. All times are in seconds on the router's clock.

const STEPS_S = 16; // history of steps and KV usage kept for the lanes
const SAMPLE_S = 5; // between two samples of the workers
export const SPAN_S = 900; // history of requests and samples

export class State {
  hello = null;
  now = 0;
  running = 0;
  queued = 0;
  open = new Map(); // requests by number
  ended = []; // in the order of their end
  workers = new Map(); // by id; each with `steps` and `usage`, both oldest first
  samples = []; // of all workers, oldest first: at, kv, fullest, ready
  pairs = [];
  models = [];
  sessions = { count: 0, rows: [] }; // the last ones, newest first
  onDemand = []; // models started on demand, with their status as text
  #at = 0;

  /** Return the current time on the router's clock. */
  clock() {
    return this.now + (performance.now() - this.#at) / 1e3;
  }

  /** Convert a time on the router's clock to a date. */
  date(at) {
    return new Date((this.hello.unix_time_s + at - this.hello.now) * 1e3);
  }

  apply(event) {
    this.now = event.now;
    this.#at = performance.now();
    this.running = event.running;
    this.queued = event.queued;
    for (const row of event.open) this.open.set(row.n, row);
    for (const row of event.ended) {
      const before = this.open.get(row.n);
      if (before) row.path = before.path;
      this.open.delete(row.n);
      this.ended.push(row);
    }
    this.#forget();
    for (const name of event.gone) this.workers.delete(name);
    for (const row of event.workers) {
      const before = this.workers.get(row.id);
      this.workers.set(row.id, Object.assign(row, { steps: before?.steps ?? [], usage: before?.usage ?? [] }));
    }
    for (const [name, steps] of Object.entries(event.steps)) this.workers.get(name)?.steps.push(...steps);
    const old = this.now - STEPS_S;
    for (const worker of this.workers.values()) {
      const { steps, usage } = worker;
      usage.push([this.now, worker.kv_usage ?? 0]);
      steps.splice(0, Math.max(0, steps.findIndex((x) => x[0] > old)));
      usage.splice(0, Math.max(0, usage.findIndex((x) => x[0] > old)));
    }
    this.#sample();
    if (event.pairs) this.pairs = event.pairs;
    if (event.models) this.models = event.models;
    if (event.sessions) this.sessions = event.sessions;
    if (event.on_demand) this.onDemand = event.on_demand;
  }

  #sample() {
    if (this.now - (this.samples.at(-1)?.at ?? -Infinity) < SAMPLE_S) return;
    const workers = [...this.workers.values()];
    const usage = workers.map((x) => x.kv_usage).filter((x) => x !== undefined);
    this.samples.push({
      at: this.now, kv: usage.length ? usage.reduce((a, b) => a + b) / usage.length : undefined,
      fullest: Math.max(0, ...usage), ready: workers.filter((x) => x.state === "ready").length,
    });
    if (this.samples[0].at < this.now - SPAN_S) this.samples.shift();
  }

  #forget() {
    const { ended } = this;
    const tooMany = ended.length - this.hello.kept;
    let count = Math.max(0, tooMany);
    while (count < ended.length && ended[count].ended < this.now - SPAN_S && ended.length - count > 200) count++;
    if (count) ended.splice(0, count);
  }

  /** Return the requests that ended in the last `span` seconds. */
  since(span) {
    const from = this.now - span;
    let i = this.ended.length;
    while (i && this.ended[i - 1].ended >= from) i--;
    return this.ended.slice(i);
  }

  /** Return the sorted values of a field of the requests. */
  values(field) {
    return [...new Set([...this.open.values(), ...this.ended].map((x) => x[field]))].filter(Boolean).sort();
  }
}

/** Return the mean time between the tokens of an answer, or undefined for one token or a part of an answer. */
export function tpotOf(row) {
  if (!row.receipt) return undefined;
  const gaps = (row.usage?.completion_tokens ?? 0) - 1;
  return gaps > 0 ? (row.ended - row.arrived - row.ttft_s) / gaps : undefined;
}

/** Return the receipt of an answer, or of the part that was made. */
export const receiptOf = (row) => row.receipt ?? row.partial_receipt;

/** Return the outcome of a request: queued, running, finished, aborted (by its client), refused or failed. */
export function fateOf(row) {
  if (!row.outcome) return row.admitted ? "running" : "queued";
  if (row.receipt) return "finished";
  if (row.outcome === "cancelled") return "aborted";
  return row.admitted ? "failed" : "refused";
}

/** Return true if a request met both targets; undefined if it was not answered. Of an aborted request the first token
 * counts; undefined if its client left before that was due. */
export function metSlo(row, slo) {
  if (!row.receipt) return row.ttft_met;
  return row.ttft_s <= slo.ttft_s && (tpotOf(row) ?? 0) <= slo.tpot_s;
}
