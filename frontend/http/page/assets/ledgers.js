// Commands and the ack of each worker, live, with the progress of staging and loading.

import { el, keyed, meter, setAttr, setText, timeOf } from "./dom.js";
import { bytes, clock, compareNames, count, duration, percent } from "./format.js";

/** Limit on listed workers of one command. Workers that have applied it come last. */
const MAX_LINES = 60;

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

const meters = new WeakMap();

function makeLine() {
  const bar = el("td");
  const row = el("tr", {}, el("th", { scope: "row" }), el("td", {}, el("span", { class: "state" }, el("span", { class: "glyph", "aria-hidden": "true" }), el("span"))), bar, el("td", { class: "numeric" }), el("td", { class: "wide" }));
  meters.set(row, meter(bar));
  return row;
}

function fillLine(row, [worker, line]) {
  const kind = kindOf(line);
  const [name, state, , seconds, error] = row.children;
  setText(name, worker);
  row.dataset.key = worker;
  setAttr(state.firstElementChild, "data-kind", kind);
  setText(state.firstElementChild.firstElementChild, SIGNS[kind]);
  setText(state.firstElementChild.lastElementChild, line.status);
  meters.get(row)(shareOf(line), lineWords(line));
  setText(seconds, line.seconds ? duration(line.seconds) : "");
  setText(error, line.error ?? "");
}

function makeLedger() {
  const summary = el("summary", {}, el("span", { class: "state" }, el("span", { class: "glyph", "aria-hidden": "true" }), el("strong")), el("span", { class: "ledger-bar" }), el("span", { class: "hint" }), el("time", { class: "hint" }));
  const body = el("tbody");
  const more = el("p", { class: "hint" });
  const heads = ["Worker", "Ack", "Progress", "Took", "Error"];
  const table = el("table", { class: "plain", "aria-label": "Ack of each worker" }, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text, class: text === "Took" ? "numeric" : "" })))), body);
  const details = el("details", {}, summary, el("div", { class: "scroll-x" }, table), more);
  const item = el("li", { class: "ledger", data: { testid: "ledger" } }, details);
  meters.set(item, meter(summary.children[1]));
  details.addEventListener("toggle", () => fillLines(item));
  return item;
}

const shown = new WeakMap();

function fillLines(item) {
  const details = item.firstElementChild;
  if (!details.open) return;
  const { workers, counts } = shown.get(item);
  const total = Object.values(counts).reduce((sum, number) => sum + number, 0);
  const lines = Object.entries(workers).sort((a, b) => RANK[kindOf(a[1])] - RANK[kindOf(b[1])] || compareNames(a[0], b[0]));
  keyed(details.querySelector("tbody"), lines.slice(0, MAX_LINES), ([worker]) => worker, makeLine, fillLine);
  const listed = Math.min(lines.length, MAX_LINES);
  setText(details.lastElementChild, total > listed ? `and ${count(total - listed)} more` : "");
}

function fillLedger(item, ledger) {
  shown.set(item, ledger);
  const lines = Object.values(ledger.workers);
  const by = { good: 0, busy: 0, bad: 0, off: 0 };
  for (const [status, number] of Object.entries(ledger.counts)) by[FINAL[status] ?? "busy"] += number;
  const total = by.good + by.busy + by.bad + by.off;
  const kind = by.bad ? "bad" : ledger.done ? "good" : "busy";
  const [state, , words, time] = item.firstElementChild.firstElementChild.children;
  setAttr(item, "data-command", ledger.command);
  setAttr(item, "data-id", ledger.id);
  setAttr(item, "data-done", String(ledger.done));
  setAttr(state, "data-kind", kind);
  setText(state.firstElementChild, SIGNS[kind]);
  setText(state.lastElementChild, ledger.command.replaceAll("_", " "));
  // `workers` does not list all workers that have applied the command.
  const underWay = lines.reduce((sum, line) => sum + (kindOf(line) === "good" ? 0 : shareOf(line)), 0);
  const share = total ? (by.good + underWay) / total : 0;
  const answered = [`${count(by.good)} of ${count(total)}`];
  if (by.off) answered.push(`${count(by.off)} superseded`);
  if (by.bad) answered.push(`${count(by.bad)} failed`);
  if (by.busy && lines.some((line) => line.progress)) answered.push(percent(share));
  meters.get(item)(share, answered.join(", "));
  setText(words, `${ledger.done ? "" : "in progress, "}by ${ledger.controller}${ledger.epoch === null ? "" : `, epoch ${ledger.epoch}`}`);
  timeOf(time, ledger.at, clock(ledger.at));
  fillLines(item);
}

/** Make the panel with the last commands of all controllers. */
export function ledgersPanel() {
  const list = el("ol", { class: "ledgers" });
  const none = el("p", { class: "empty", hidden: true, text: "No command has arrived since this page was opened." });
  return {
    root: el("section", { class: "panel", "aria-labelledby": "commands-title", data: { testid: "commands" } }, el("div", { class: "panel-head" }, el("h2", { id: "commands-title", text: "Commands" })), list, none),
    update({ commands = [] }) {
      none.hidden = commands.length > 0;
      keyed(list, [...commands].sort((a, b) => b.at - a.at), ({ id }) => id, makeLedger, fillLedger);
    },
  };
}
