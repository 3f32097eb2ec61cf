// The last day: recorded commands, and starts and losses of workers, as words, as a timeline and as marks of charts.

import { el, setAttr, svg } from "./dom.js";
import { clock, count, duration, plural } from "./format.js";
import { now } from "./store.js";

const DAY_S = 86_400;
/** Time spans of the timeline in seconds: the shortest one that includes all events is shown. */
const SPANS = [3600, 6 * 3600, DAY_S];
/** Starts or losses of workers of a model within these seconds are one line. */
const TOGETHER_S = 60;
/** Limit on named workers of a line. The others are counted. */
const MAX_NAMED = 4;

const UPDATE = { lane: "updates", kind: "busy", sign: "▲" };
const STOP = { lane: "pauses", kind: "held", sign: "Ⅱ" };
const START = { lane: "pauses", kind: "good", sign: "▶" };
const KINDS = {
  pause: STOP, drain: STOP, sleep: STOP, resume: START, wake: START,
  update_weights: UPDATE, finish_weight_update: UPDATE, load_lora: UPDATE, unload_lora: UPDATE,
  undo: { lane: "updates", kind: "bad", sign: "↩" },
  started: { lane: "restarts", kind: "good", sign: "●" },
  returned: { lane: "restarts", kind: "warn", sign: "◐" },
  restarted: { lane: "restarts", kind: "bad", sign: "↻" },
  gone: { lane: "restarts", kind: "bad", sign: "✕" },
};
const OTHER = { lane: null, kind: "off", sign: "•" };

/** Return how an event is shown: its lane of the timeline, its sign and its kind of colour. */
export const kindOf = ({ what }) => KINDS[what] ?? OTHER;

/** Return the events of the last day from the oldest to the newest. */
export function dayEvents() {
  const { commands = [], workers = [] } = now.day ?? {};
  const first = Date.now() / 1000 - DAY_S;
  return [...commands, ...workers].filter(({ at }) => at >= first).sort((a, b) => a.at - b.at);
}

/** Join starts or losses of several workers at about the same time. Each result has the names in `workers`. */
export function joinedEvents(events) {
  const found = [];
  const open = new Map();
  for (const event of events) {
    const key = `${event.what}\n${event.model}`;
    const last = open.get(key);
    if (event.worker && last && event.at - last.at < TOGETHER_S) last.workers.push(event.worker);
    else {
      found.push({ ...event, workers: event.worker ? [event.worker] : (event.workers ?? []) });
      open.set(key, found.at(-1));
    }
  }
  return found;
}

/** Return whom an event concerns, with its details. */
export function eventWords({ workers, num_workers: all = workers.length, detail, model }) {
  const names = workers.slice(0, MAX_NAMED).join(", ") + (all > MAX_NAMED ? ` and ${plural(all - MAX_NAMED, "other")}` : "");
  return [names || model, detail].filter(Boolean).join(": ");
}

/** Return the marks of charts, of all workers or one: `{at, text}`. */
export function chartMarks(worker = null) {
  const model = worker && now.fleet?.workers.find((each) => each.worker === worker)?.model;
  const isMeant = (event) => !worker || event.worker === worker || (!event.worker && event.model === model && (!event.workers || event.workers.includes(worker)));
  return joinedEvents(dayEvents().filter(isMeant)).map(({ at, what, workers, detail }) => ({
    at,
    text: KINDS[what]?.lane === "restarts" ? `${workers.length > 1 ? count(workers.length) : workers[0]} ${what}` : KINDS[what] === UPDATE && detail ? detail : what.replaceAll("_", " "),
  }));
}

/** Return the pauses as `{from, to, detail}`; `to` is null while they last. */
function pausesOf(events) {
  const all = [];
  const open = new Map();
  for (const event of events) {
    const kind = kindOf(event);
    const ends = kind === START || event.what === "reset" || (event.what === "undo" && !/pause|drain|sleep/.test(event.detail ?? ""));
    for (const [key, pause] of open) {
      if (!(kind === STOP || ends) || pause.model !== event.model || (event.workers && key !== `${event.model}\n${event.workers}`)) continue;
      pause.to = event.at;
      open.delete(key);
    }
    if (kind !== STOP) continue;
    all.push({ model: event.model, from: event.at, to: null, detail: event.what });
    open.set(`${event.model}\n${event.workers ?? ""}`, all.at(-1));
  }
  for (const { model, pause, paused_since: from } of now.fleet?.models ?? []) {
    if (pause && from && !all.some((each) => each.model === model && each.to === null)) all.push({ model, from, to: null, detail: pause });
  }
  return all;
}

/** Make the timeline: a lane each for restarts, updates and pauses. */
export function dayTimeline() {
  const lanes = ["restarts", "updates", "pauses"].map((name) => ({ name, drawing: svg("svg", { class: "day-lane", role: "img" }) }));
  const axis = svg("svg", { class: "day-lane", "aria-hidden": "true" });
  const root = el("div", { class: "day", data: { testid: "day" } }, ...lanes.flatMap(({ name, drawing }) => [el("span", { text: name }), drawing]), el("span"), axis);
  return {
    root,
    update() {
      const events = dayEvents();
      const end = Date.now() / 1000;
      const oldest = Math.min(end, ...events.map(({ at }) => at));
      const span = SPANS.find((each) => end - oldest <= each) ?? DAY_S;
      const x = (at) => `${Math.max(0, (100 * (at - end + span)) / span).toFixed(2)}%`;
      const titled = (shape, text) => {
        const title = svg("title");
        title.textContent = text;
        shape.append(title);
        return shape;
      };
      for (const { name, drawing } of lanes) {
        const own = events.filter((event) => kindOf(event).lane === name);
        const bars = name !== "pauses" ? [] : pausesOf(events).map(({ model, from, to, detail }) => titled(svg("rect", { x: x(from), y: 3, height: 12, width: `${Math.max(0.2, (100 * ((to ?? end) - Math.max(from, end - span))) / span)}%`, "data-kind": "held" }), `${detail} of ${model}, ${duration((to ?? end) - from)}${to ? "" : ", lasts"}`));
        const marks = joinedEvents(own).map((event) => titled(svg("rect", { x: x(event.at), y: 1, height: 16, width: 2, "data-kind": kindOf(event).kind, "data-what": event.what }), `${clock(event.at)} ${event.what.replaceAll("_", " ")} ${eventWords(event)}`));
        drawing.replaceChildren(...bars, ...marks);
        setAttr(drawing, "aria-label", `${name}: ${count(own.length)} in ${duration(span)}`);
      }
      axis.replaceChildren(...[0, 1, 2, 3, 4, 5].map((place) => {
        const text = svg("text", { x: `${(100 * place) / 6}%`, y: 12 });
        text.textContent = clock(end - span + (span * place) / 6).replace(/:\d\d$/, "");
        return text;
      }));
    },
  };
}

/** Say from when the list is complete, and what was never known. */
export function sinceWords() {
  if (!now.day) return "";
  const { commands_since: commands, workers_since: workers, problem } = now.day;
  const missing = commands > Date.now() / 1000 - DAY_S ? ` Commands before ${clock(commands)} are gone: the store keeps 64 of each model.` : "";
  return `${problem ? `${problem}. ` : ""}Commands come from the store; acks of workers are shown for commands that were sent while a page was open.${missing} Starts and losses are complete since ${clock(workers)}; of the time before, only the last start of each worker is known.`;
}
