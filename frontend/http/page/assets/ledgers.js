// What happened: commands with the ack of each worker, live, and recorded commands and restarts of the last day.

import { dayEvents, dayTimeline, eventWords, joinedEvents, kindOf as kindOfEvent, sinceWords } from "./day.js";
import { el, fillMark, keyed, mark, meter, setText, timeOf } from "./dom.js";
import { bytes, clock, compareNames, count, duration, percent } from "./format.js";

/** Limit on listed workers of one command. Workers that have applied it come last. */
const MAX_LINES = 60;
/** Limit on listed commands and restarts. */
const MAX_EVENTS = 200;

const FINAL = { applied: "good", failed: "bad", unsupported: "bad", missing: "bad", late: "bad", stale: "off" };
const SIGNS = { bad: "✕", good: "✓", busy: "◐", off: "–" };
const RANK = { bad: 0, busy: 1, off: 2, good: 3 };

const kindOf = (line) => (line.error ? "bad" : (FINAL[line.status] ?? "busy"));

function shareOf(line) {
  if (kindOf(line) === "good") return 1;
  const { done_bytes: done, total_bytes: total } = line.progress ?? {};
  return total ? done / total : 0;
}

function lineWords(line) {
  const { done_bytes: done, total_bytes: total } = line.progress ?? {};
  const size = total ? `${bytes(done)} of ${bytes(total)}` : "";
  return [line.stage && line.stage !== line.status ? line.stage : "", size].filter(Boolean).join(" ");
}

function ackLine() {
  const [name, state, bar] = [el("th", { scope: "row" }), mark(), el("td")];
  const [seconds, error] = [el("td", { class: "numeric" }), el("td", { class: "wide" })];
  const fill = meter(bar);
  const root = el("tr", {}, name, el("td", {}, state), bar, seconds, error);
  return {
    root,
    update([worker, line]) {
      const kind = kindOf(line);
      setText(name, worker);
      root.dataset.key = worker;
      fillMark(state, kind, SIGNS[kind], line.status);
      fill(shareOf(line), lineWords(line));
      setText(seconds, line.seconds ? duration(line.seconds) : "");
      setText(error, line.error ?? "");
    },
  };
}

const makeHead = (tag) => el(tag, { class: "line" }, mark("span", "strong"), el("span", { class: "ledger-bar" }), el("span", { class: "hint" }), el("time", { class: "hint" }));

function fillHead(head, kind, sign, name, by, at) {
  const [state, , words, time] = head.children;
  fillMark(state, kind, sign, name.replaceAll("_", " "));
  setText(words, by);
  timeOf(time, at, clock(at));
}

function ledgerItem() {
  const head = makeHead("summary");
  const body = el("tbody");
  const more = el("p", { class: "hint" });
  const heads = ["Worker", "Ack", "Progress", "Took", "Error"];
  const table = el("table", { class: "plain", "aria-label": "Ack of each worker" }, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text, class: text === "Took" ? "numeric" : "" })))), body);
  const details = el("details", { on: { toggle: () => fillLines() } }, head, el("div", { class: "scroll-x" }, table), more);
  const root = el("li", { class: "ledger", data: { testid: "ledger" } }, details);
  const fill = meter(head.children[1]);
  let shown = null;

  function fillLines() {
    if (!details.open) return;
    const { workers, counts } = shown;
    const total = Object.values(counts).reduce((sum, number) => sum + number, 0);
    const lines = Object.entries(workers).sort((a, b) => RANK[kindOf(a[1])] - RANK[kindOf(b[1])] || compareNames(a[0], b[0]));
    keyed(body, lines.slice(0, MAX_LINES), ([worker]) => worker, ackLine);
    const listed = Math.min(lines.length, MAX_LINES);
    setText(more, total > listed ? `and ${count(total - listed)} more` : "");
  }

  function update(ledger) {
    shown = ledger;
    const lines = Object.values(ledger.workers);
    const by = { good: 0, busy: 0, bad: 0, off: 0 };
    for (const [status, number] of Object.entries(ledger.counts)) by[FINAL[status] ?? "busy"] += number;
    const total = by.good + by.busy + by.bad + by.off;
    const kind = by.bad ? "bad" : ledger.done ? "good" : "busy";
    Object.assign(root.dataset, { command: ledger.command, id: ledger.id, done: ledger.done });
    // `workers` does not list all workers that have applied the command.
    const underWay = lines.reduce((sum, line) => sum + (kindOf(line) === "good" ? 0 : shareOf(line)), 0);
    const share = total ? (by.good + underWay) / total : 0;
    const answered = [`${count(by.good)} of ${count(total)}`];
    if (by.off) answered.push(`${count(by.off)} superseded`);
    if (by.bad) answered.push(`${count(by.bad)} failed`);
    if (by.busy && lines.some((line) => line.progress)) answered.push(percent(share));
    fill(share, answered.join(", "));
    fillHead(head, kind, SIGNS[kind], ledger.command, `${ledger.done ? "" : "in progress, "}by ${ledger.controller}${ledger.epoch === null ? "" : `, epoch ${ledger.epoch}`}`, ledger.at);
    fillLines();
  }

  return { root, update };
}

function eventItem() {
  const head = makeHead("div");
  const root = el("li", { class: "ledger", data: { testid: "event" } }, head);
  return {
    root,
    update(event) {
      const { kind, sign } = kindOfEvent(event);
      root.dataset.what = event.what;
      setText(head.children[1], eventWords(event));
      fillHead(head, kind, sign, event.what, event.epoch ? `${event.by ? `by ${event.by}, ` : ""}epoch ${event.epoch}` : "", event.at);
    },
  };
}

/** Make the panel with the last commands of all controllers, and the restarts of workers. */
export function ledgersPanel() {
  const list = el("ol", { class: "ledgers" });
  const none = el("p", { class: "empty", hidden: true, text: "Nothing happened in the last day, as far as is known." });
  const timeline = dayTimeline();
  const since = el("p", { class: "hint day-since", data: { testid: "day-since" } });
  return {
    root: el("section", { class: "panel", "aria-labelledby": "commands-title", data: { testid: "commands" } }, el("div", { class: "panel-head" }, el("h2", { id: "commands-title", text: "Commands and restarts" })), timeline.root, list, none, since),
    update({ commands = [] }) {
      const known = new Set(commands.map(({ id }) => id));
      const events = joinedEvents(dayEvents().filter(({ id }) => !known.has(id)));
      const all = [...commands, ...events].sort((a, b) => b.at - a.at).slice(0, MAX_EVENTS);
      none.hidden = all.length > 0;
      keyed(list, all, ({ id, controller, what, at, model, workers }) => (controller ? id : `${what} ${at} ${model} ${workers[0] ?? ""}`), ({ controller }) => (controller ? ledgerItem() : eventItem()));
      timeline.update();
      setText(since, sinceWords());
    },
  };
}
