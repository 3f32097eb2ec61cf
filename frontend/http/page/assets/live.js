// The event stream of this page. It is read with fetch, which can send a token, and restarted when it ends.

import { ask, HttpProblem } from "./session.js";
import { put, takeEvent } from "./store.js";

/** Limit on the length of an event. The counts of the largest model have about 1 MB. */
const MAX_CHARS = 32 * 1024 * 1024;

/** Parses events and calls `onEvent(name, data)` after the last line of each event. */
class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = "";
    this.name = "";
    this.data = [];
  }

  add(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    if (this.rest.length > MAX_CHARS) throw new Error("the service sent an event that is too large");
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  #line(line) {
    if (line === "") {
      const [name, data] = [this.name || "message", this.data.join("\n")];
      this.name = "";
      this.data = [];
      if (data) this.onEvent(name, data);
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.name = value;
    else if (field === "data") this.data.push(value);
  }
}

const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 10_000;
/** Silence after which the connection counts as dead. The service sends the fleet every second. */
const SILENCE_MS = 20_000;
/** A page closes its connection after this time hidden, because a browser opens only six connections to a host. */
const HIDDEN_MS = 30_000;

/**
 * Reads `path` until stopped.
 * `onEvent(name, value)` receives each event. `onState(state)` receives `{kind, since, problem, retryAt}`, where `kind`
 * is `connecting`, `live`, `lost` (next try at `retryAt`), `denied` (waits for `restart` with another token) or
 * `resting` (the page is hidden; the stream restarts when the page is shown).
 * `onRefused(problem)` receives the reason why the service rejected the path, and returns the path to read instead.
 */
class EventStream {
  constructor(path, onEvent, onState, onRefused) {
    this.path = path;
    this.onEvent = onEvent;
    this.onState = onState;
    this.onRefused = onRefused;
    this.state = { kind: "connecting", since: Date.now(), problem: null, retryAt: null };
    this.wait = FIRST_RETRY_MS;
    this.run = null;
    this.retry = 0;
    this.silence = 0;
    this.hiding = 0;
    window.addEventListener("online", () => this.#comeBack());
    document.addEventListener("visibilitychange", () => {
      clearTimeout(this.hiding);
      if (document.hidden) this.hiding = setTimeout(() => this.#rest(), HIDDEN_MS);
      else this.#comeBack();
    });
  }

  #comeBack() {
    if (!document.hidden && ["lost", "resting"].includes(this.state.kind)) this.restart();
  }

  #rest() {
    if (this.state.kind === "denied") return;
    clearTimeout(this.retry);
    clearTimeout(this.silence);
    this.run?.abort();
    this.run = null;
    this.#become("resting", null);
  }

  /** Start or restart the stream, with another path or immediately after a loss. */
  restart(path = this.path) {
    this.path = path;
    this.run?.abort();
    clearTimeout(this.retry);
    clearTimeout(this.silence);
    this.run = new AbortController();
    this.#read(this.run);
  }

  async #read(run) {
    let problem = "the service ended the stream";
    try {
      this.#listen(run);
      const answer = await ask(this.path, { signal: run.signal, accept: "text/event-stream" });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new EventParser((name, data) => this.#event(run, name, data));
      for (;;) {
        const { done, value } = await reader.read();
        if (run !== this.run) return;
        if (done) break;
        this.#listen(run);
        parser.add(value);
      }
    } catch (error) {
      if (run !== this.run) return;
      if (error instanceof HttpProblem && error.status === 401) {
        clearTimeout(this.silence);
        this.#become("denied", error.message);
        return;
      }
      if (error instanceof HttpProblem && (error.status === 400 || error.status === 404)) {
        const other = this.onRefused(error.message);
        if (other !== this.path) {
          this.restart(other);
          return;
        }
      }
      problem = this.problem ?? (error instanceof HttpProblem ? error.message : "the service cannot be reached");
    }
    clearTimeout(this.silence);
    run.abort();
    this.problem = null;
    // A random delay, so that many pages do not reconnect at the same time.
    const wait = this.wait * (0.75 + Math.random() / 2);
    this.wait = Math.min(2 * this.wait, MAX_RETRY_MS);
    this.#become("lost", problem, Date.now() + wait);
    this.retry = setTimeout(() => this.restart(), wait);
  }

  #event(run, name, data) {
    if (run !== this.run) return;
    this.wait = FIRST_RETRY_MS;
    this.#become("live", null);
    this.onEvent(name, JSON.parse(data));
  }

  #listen(run) {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => {
      this.problem = "the service sends nothing";
      run.abort();
    }, SILENCE_MS);
  }

  #become(kind, problem, retryAt = null) {
    if (kind === this.state.kind && kind === "live") return;
    const since = kind === this.state.kind ? this.state.since : Date.now();
    this.state = { kind, since, problem, retryAt };
    this.onState(this.state);
  }
}

const PATH = "v1/rl/events";

/** Time of the last `fleet` event, on this machine's clock. */
export const heard = { at: Date.now() };

/** The stream that feeds the page. */
export const stream = new EventStream(
  PATH,
  (name, value) => {
    if (name === "fleet") heard.at = Date.now();
    takeEvent(name, value);
  },
  (state) => put("link", state),
  (problem) => {
    if (watched) put("experts", { ...watched, problem });
    return PATH;
  },
);

/** The model and worker whose experts are watched; null for none. */
let watched = null;

/** Also request the load of a model's experts, for all its workers or one. With null, stop this. */
export function watchExperts(model, worker = null) {
  if (watched?.model === model && watched?.worker === worker) return;
  if (!watched && !model) return;
  watched = model ? { model, worker } : null;
  put("experts", null);
  const query = new URLSearchParams(model ? { experts: model, ...(worker ? { worker } : {}) } : {});
  stream.restart(model ? `${PATH}?${query}` : PATH);
}
