// One request over time: a lane for each attempt on a worker, with its phases as bars and its events as marks.

import { el, svg } from "./dom.js";
import { clock, count, duration, plural, version } from "./format.js";

const ROW = 46;
const TOP = 26;
const MIN_WIDE = 560;
const LABEL_PX = 70;
const PHASES = { __proto__: null, published: ["in the queue", "wait"], offered: ["accepted", "wait"], started: ["prefill", "prefill"], prefilled: ["to the first token", "prefill"], first_token: ["decode", "decode"], resumed: ["decode", "decode"], held: ["held", "held"], restarted: ["prompt again", "prefill"] };
const WORDS = { __proto__: null, published: "in the queue", offered: "accepted by the worker", started: "sent to the engine", prefilled: "prompt computed", first_token: "first token", held: "held", resumed: "resumed", weights: "new weights", restarted: "prompt is computed again", ended: "ended", lost: "lost" };

const times = (timelines) => timelines.flatMap(({ events }) => events.map(({ at }) => at));

/** Return the details of an event. */
function detailsOf({ event, weight_version: of, tokens, cached_tokens: cached, reason }) {
  const parts = [];
  if (of !== null && of !== undefined) parts.push(`weights ${version(of)}`);
  if (tokens !== null && tokens !== undefined) parts.push(event === "prefilled" ? plural(tokens, "prompt token") : `${plural(tokens, "token")} ${event === "ended" ? "in all" : event === "lost" ? "kept" : "so far"}`);
  if (cached) parts.push(`${count(cached)} of them cached`);
  if (reason) parts.push(reason);
  return parts.join(", ");
}

/** Return the phases between events: `{from, to, words, kind}`. */
export function phasesOf(events) {
  const found = [];
  for (const { at, event } of events) {
    const last = found.at(-1);
    if (last && last.to === null && (event in PHASES || event === "ended")) last.to = at;
    if (event in PHASES) found.push({ from: at, to: null, words: PHASES[event][0], kind: PHASES[event][1] });
  }
  return found;
}

/** Return the name of an attempt: its number, its sample if there are several, and its phase if two workers serve it. */
export function nameOf({ number, child, phase }) {
  return `attempt ${number}${child ? `, sample ${child}` : ""}${phase ? `, ${phase} phase` : ""}`;
}

function lane({ worker, events, ...attempt }, row, x, until, wide) {
  const y = TOP + row * ROW;
  const group = svg("g", {});
  group.append(svg("line", { x1: 0, x2: wide, y1: y + ROW - 2, y2: y + ROW - 2, class: "lane-line" }));
  const name = svg("text", { x: 4, y: y + 12, class: "lane-name" });
  name.textContent = `${worker || "no worker"}, ${nameOf(attempt)}`;
  group.append(name);
  for (const { from, to, words, kind } of phasesOf(events)) {
    const title = svg("title");
    title.textContent = `${words}, ${to === null ? "continues" : duration(to - from)}`;
    group.append(svg("rect", { x: x(from), y: y + 19, width: Math.max(1.5, x(to ?? until) - x(from)), height: 13, rx: 2, class: `phase ${kind}${to === null ? " open" : ""}` }, title));
  }
  for (const event of events) {
    const title = svg("title");
    title.textContent = `${WORDS[event.event] ?? event.event} ${detailsOf(event)}`;
    group.append(svg("path", { d: `M${x(event.at)} ${y + 16}v19`, class: `mark mark-${event.event}` }, title));
    if (event.event === "weights") {
      const text = svg("text", { x: x(event.at) + 3, y: y + 42, class: "mark-text" });
      text.textContent = version(event.weight_version);
      group.append(text);
    }
  }
  return group;
}

function axis(first, last, x, rows, wide) {
  const group = svg("g", { class: "time-axis" });
  const span = last - first || 1;
  // Clocks may be years apart. The number of lines is then limited by the width.
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400].find((each) => (span / each) * LABEL_PX <= wide) ?? (span / wide) * LABEL_PX;
  for (let at = 0; at <= span; at += step) {
    group.append(svg("line", { x1: x(first + at), x2: x(first + at), y1: TOP - 6, y2: TOP + rows * ROW }));
    // Leave out the last label if it does not fit.
    if (x(first + at) + LABEL_PX / 2 > wide) continue;
    const text = svg("text", { x: x(first + at) + 3, y: 12 });
    text.textContent = `+${duration(at)}`;
    group.append(text);
  }
  return group;
}

/** Draw the lanes, `room` pixels wide. The drawing is one image for screen readers, because the list has the same data as text. */
export function drawTimelines(timelines, room) {
  const wide = Math.max(MIN_WIDE, room);
  const all = times(timelines);
  const [first, last] = [Math.min(...all), Math.max(...all)];
  const isOpen = timelines.some(({ events }) => !["ended", "lost"].includes(events.at(-1)?.event));
  const until = isOpen ? Math.max(last, Date.now() / 1000) : last;
  const x = (at) => 2 + ((at - first) / (until - first || 1)) * (wide - 6);
  const drawing = svg("svg", { width: wide, height: TOP + timelines.length * ROW + 6, role: "img", "aria-label": `Timeline of ${timelines.length} attempts, ${duration(last - first)} in all`, class: "timeline" });
  drawing.append(axis(first, until, x, timelines.length, wide), ...timelines.map((each, row) => lane(each, row, x, until, wide)));
  return drawing;
}

/** Make the table of the events of one attempt. */
export function listOf(timeline, first) {
  const { events } = timeline;
  const rows = events.map((event, index) => {
    const next = events[index + 1];
    const at = el("time", { text: `+${duration(event.at - first)}`, title: `${clock(event.at)}, ${new Date(event.at * 1000).toISOString()}`, datetime: new Date(event.at * 1000).toISOString() });
    return el("tr", { data: { event: event.event } }, el("td", { class: "numeric" }, at), el("th", { scope: "row", text: WORDS[event.event] ?? event.event }), el("td", { class: "wide", text: detailsOf(event) }), el("td", { class: "numeric", text: next ? duration(next.at - event.at) : "" }));
  });
  const head = el("tr", {}, ...[["At", "numeric"], ["Event", ""], ["", ""], ["Until the next", "numeric"]].map(([text, name]) => el("th", { scope: "col", class: name, text })));
  return el("div", { class: "scroll-x" }, el("table", { class: "plain", "aria-label": `Events of ${nameOf(timeline)}` }, el("thead", {}, head), el("tbody", {}, ...rows)));
}
