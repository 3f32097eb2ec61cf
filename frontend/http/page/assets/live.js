// The event stream of this page. It is read with fetch, which can send a token, and restarted when it ends.

import { ask, HttpProblem } from "./session.js";
import { put, takeEvent } from "./store.js";

const PATH = "v1/rl/events";
/** An event: its name, and JSON in one line. Other blocks are comments. */
const EVENT = /^event: (\w+)\ndata: (.*)$/s;
/** Limit on the length of an event. The counts of the largest model have about 1 MB. */
const MAX_CHARS = 32 * 1024 * 1024;
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 10_000;
/** Silence after which the connection counts as dead. The service sends the fleet every second. */
const SILENCE_MS = 20_000;
/** A page closes its connection after this time hidden, because a browser opens only six connections to a host. */
const HIDDEN_MS = 30_000;

/** Time of the last `fleet` event, on this machine's clock. */
export const heard = { at: Date.now() };

/** The model and worker whose experts are watched; null for none. */
let watched = null;

/**
 * Stores the events, and its state as `link`: `{kind, problem, retryAt}`, where `kind` is `connecting`, `live`,
 * `lost` (next try at `retryAt`), `denied` (waits for `restart` with another token) or `resting` (the page is hidden;
 * the stream restarts when the page is shown).
 */
class EventStream {
  #path = PATH;
  #state = { kind: "connecting" };
  #wait = FIRST_RETRY_MS;
  #run = null;
  #retry = 0;
  #silence = 0;
  #hiding = 0;

  constructor() {
    window.addEventListener("online", () => this.#comeBack());
    document.addEventListener("visibilitychange", () => {
      clearTimeout(this.#hiding);
      if (document.hidden) this.#hiding = setTimeout(() => this.#rest(), HIDDEN_MS);
      else this.#comeBack();
    });
  }

  #comeBack() {
    if (!document.hidden && ["lost", "resting"].includes(this.#state.kind)) this.restart();
  }

  #stop() {
    clearTimeout(this.#retry);
    clearTimeout(this.#silence);
    this.#run?.abort();
    this.#run = null;
  }

  #rest() {
    if (this.#state.kind === "denied") return;
    this.#stop();
    this.#become("resting", null);
  }

  /** Start or restart the stream, with another path or immediately after a loss. */
  restart(path = this.#path) {
    this.#path = path;
    this.#stop();
    this.#run = new AbortController();
    this.#read(this.#run);
  }

  async #read(run) {
    let problem = "the service ended the stream";
    const listen = () => {
      clearTimeout(this.#silence);
      this.#silence = setTimeout(() => run.abort("the service sends nothing"), SILENCE_MS);
    };
    try {
      listen();
      const answer = await ask(this.#path, { signal: run.signal, accept: "text/event-stream" });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (run !== this.#run) return;
        if (done) break;
        listen();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        if (rest.length > MAX_CHARS) throw new Error("the service sent an event that is too large");
        for (const block of blocks) this.#take(block);
      }
    } catch (error) {
      if (run !== this.#run) return;
      const status = error instanceof HttpProblem ? error.status : 0;
      if (status === 401) {
        clearTimeout(this.#silence);
        this.#become("denied", error.message);
        return;
      }
      if (status === 400 || status === 404) {
        if (watched) put("experts", { ...watched, problem: error.message });
        if (this.#path !== PATH) {
          this.restart(PATH);
          return;
        }
      }
      problem = run.signal.aborted ? run.signal.reason : status ? error.message : "the service cannot be reached";
    }
    clearTimeout(this.#silence);
    run.abort();
    // A random delay, so that many pages do not reconnect at the same time.
    const wait = this.#wait * (0.75 + Math.random() / 2);
    this.#wait = Math.min(2 * this.#wait, MAX_RETRY_MS);
    this.#become("lost", problem, Date.now() + wait);
    this.#retry = setTimeout(() => this.restart(), wait);
  }

  #take(block) {
    const found = EVENT.exec(block);
    if (!found) return;
    const [, name, data] = found;
    this.#wait = FIRST_RETRY_MS;
    this.#become("live", null);
    if (name === "fleet") heard.at = Date.now();
    takeEvent(name, JSON.parse(data));
  }

  #become(kind, problem, retryAt = null) {
    if (kind === this.#state.kind && kind === "live") return;
    this.#state = { kind, problem, retryAt };
    put("link", this.#state);
  }
}

/** The stream that feeds the page. */
export const stream = new EventStream();

/** Also request the load of a model's experts, for all its workers or one. With null, stop this. */
export function watchExperts(model, worker = null) {
  if (watched?.model === model && watched?.worker === worker) return;
  if (!watched && !model) return;
  watched = model ? { model, worker } : null;
  put("experts", null);
  const query = new URLSearchParams(model ? { experts: model, ...(worker ? { worker } : {}) } : {});
  stream.restart(model ? `${PATH}?${query}` : PATH);
}
