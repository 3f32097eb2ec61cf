// The view of throughput: the last hour of the fleet, of each model, or of one worker.

import { MAX_LINES, TimeChart } from "./chart.js";
import { chartMarks } from "./day.js";
import { el, keyed, setAttr, setText, showText } from "./dom.js";
import { compareNames, count, duration, NONE, plural, rate } from "./format.js";
import { address, route, setParams } from "./router.js";
import { ask } from "./session.js";
import { now, on } from "./store.js";

/** Number of points in an hour. */
const MAX_POINTS = 720;

/** Append new points to known series, in objects of any depth, with null where a series has none. */
function joined(known, added, before, number) {
  if (Array.isArray(known ?? added)) {
    const padded = (list = [], length) => [...new Array(Math.max(0, length - list.length)).fill(null), ...list];
    return [...padded(known, before), ...padded(added, number)].slice(-MAX_POINTS);
  }
  const names = new Set([...Object.keys(known ?? {}), ...Object.keys(added ?? {})]);
  return Object.fromEntries([...names].map((name) => [name, joined(known?.[name], added?.[name], before, number)]));
}

const lengthOf = (series) => Math.max(0, ...Object.values(series).map((list) => list.length));

/** The history of the fleet and of each model, and of one worker if `worker` is set. */
class History {
  constructor() {
    this.clear();
  }

  clear(worker = null) {
    Object.assign(this, { worker, number: null, end: 0, step: 5, length: 0, fleet: {}, models: {}, workers: {}, isAsking: false });
  }

  /** Times of the points, in Unix seconds. */
  get times() {
    return Array.from({ length: this.length }, (_, index) => this.end - (this.length - 1 - index) * this.step);
  }

  /** Request new points. Returns true if there are any. Raises `HttpProblem`. */
  async update(number, startedAt) {
    if (this.isAsking || (number !== undefined && number === this.number && startedAt === this.startedAt)) return false;
    const { worker } = this;
    // A different service numbers its points from a different start.
    const isNew = this.number === null || number < this.number || startedAt !== this.startedAt;
    const query = new URLSearchParams({ ...(isNew ? {} : { since: this.number }), ...(worker ? { worker } : {}) });
    this.isAsking = true;
    try {
      const body = await (await ask(`v1/rl/history?${query}`)).json();
      if (worker !== this.worker) return false;
      this.#add(body, isNew || body.number < this.number);
      this.startedAt = startedAt;
      return true;
    } finally {
      if (worker === this.worker) this.isAsking = false;
    }
  }

  #add(body, isNew) {
    const before = isNew ? 0 : this.length;
    const series = [body.fleet, ...Object.values(body.models), ...Object.values(body.workers)];
    const points = Math.max(0, ...series.map(lengthOf));
    for (const part of ["fleet", "models", "workers"]) this[part] = joined(isNew ? {} : this[part], body[part], before, points);
    this.length = Math.min(MAX_POINTS, before + points);
    Object.assign(this, { number: body.number, end: body.end, step: body.step_s });
  }
}

const CHARTS = [
  { key: "tokens_per_s", title: "Tokens per second", hint: "Generated tokens of all requests", format: rate },
  { key: "first_token_s", title: "First token", hint: "Mean time from the offer of a request to its first token", format: duration },
  { key: "between_tokens_s", title: "Between tokens", hint: "Mean time for each token after the first", format: duration },
  { key: "queue_wait_s", title: "Queue wait", hint: "Mean time in the queue until a worker accepts a request", format: duration },
  { key: "waiting", title: "Waiting", hint: "Requests in the queue", format: count, isWhole: true },
  { key: "in_flight", title: "In flight", hint: "Requests that workers have accepted and not ended", format: count, isWhole: true },
];

/** Displayed time spans in minutes. The default is the shortest span that includes all data. */
const SPANS = [5, 15, 60];
/** Time until the next request after an error. */
const ASK_AGAIN_MS = 5000;

/** Make an input for a name, with a list of the known names. */
export function nameChoice(id, title, onChoice) {
  const names = el("datalist", { id: `${id}-names` });
  const input = el("input", { id, list: names.id, placeholder: `all ${title.toLowerCase()}s`, spellcheck: "false", autocomplete: "off", data: { testid: id }, on: { change: () => onChoice(input.value.trim()) } });
  return {
    root: el("label", { class: "choice" }, el("span", { text: title }), input, names),
    input,
    update(known) {
      keyed(names, [...new Set(known)].sort(compareNames), (name) => name, (name) => el("option", { value: name }), () => {});
    },
  };
}

/** Make the view. */
export function throughputView() {
  const history = new History();
  const charts = CHARTS.map((each) => ({ ...each, chart: new TimeChart({ ...each, testid: `chart-${each.key}` }) }));
  const by = el("select", { id: "by", data: { testid: "by" }, on: { change: () => go({ by: by.value, worker: "" }) } }, el("option", { value: "", text: "the whole fleet" }), el("option", { value: "model", text: "each model" }), el("option", { value: "worker", text: "one worker" }));
  const span = el("select", { id: "span", data: { testid: "span" }, on: { change: () => go({ span: span.value }) } }, el("option", { value: "", text: "all data" }), ...SPANS.map((minutes) => el("option", { value: minutes, text: `the last ${minutes} minutes` })));
  const choice = nameChoice("chart-worker", "Worker", (worker) => go({ by: "", worker }));
  const note = el("p", { class: "hint", role: "status" });
  const facts = el("p", { data: { testid: "worker-facts" } });
  const failure = el("p", { class: "notice", hidden: true });
  const requests = el("a", { text: "Its requests" });
  const back = el("a", { href: address("fleet"), text: "All workers" });
  const root = el("div", { class: "view" },
    el("div", { class: "controls" }, el("label", { class: "choice" }, el("span", { text: "Show" }), by), choice.root, el("label", { class: "choice" }, el("span", { text: "Of" }), span), back, requests, note),
    facts, failure,
    el("div", { class: "charts" }, ...charts.map(({ chart }) => chart.root)));

  let askAgainAt = 0;

  function go(changes) {
    setParams(changes);
    show();
  }

  function draw() {
    const { params } = route();
    const worker = history.worker;
    const lines = worker ? [[worker, history.workers[worker] ?? {}]] : params.get("by") === "model" ? Object.entries(history.models).sort((a, b) => compareNames(a[0], b[0])) : [["fleet", history.fleet]];
    const times = history.times;
    const known = SPANS.find((minutes) => history.length * history.step <= minutes * 60) ?? SPANS.at(-1);
    const seconds = 60 * (Number(params.get("span")) || known);
    span.value = params.get("span") ?? "";
    const marks = chartMarks(worker);
    for (const { key, chart } of charts) {
      const shown = lines.filter(([, series]) => series[key]?.some((value) => value !== null));
      chart.seconds = seconds;
      chart.setData(times, shown.map(([, series]) => series[key]), shown.map(([name]) => name), marks);
      chart.root.classList.toggle("without", !shown.length);
    }
    const row = worker && now.fleet?.workers.find((each) => each.worker === worker);
    setText(facts, row ? [row.state.replaceAll("_", " "), `incarnation ${row.incarnation}, up ${duration(row.uptime_s)}`, row.host && `host ${row.host}, process ${row.pid ?? NONE}`, row.log ? `log ${row.log}` : "no log file is known"].filter(Boolean).join(" · ") : "");
    showText(failure, row?.last_error ?? "");
    const isThere = !worker || Boolean(row);
    const more = lines.length > MAX_LINES ? `${plural(lines.length - MAX_LINES, "model")} more are not shown.` : "";
    setText(note, !isThere ? `There is no worker ${worker} now.` : worker && !history.workers[worker] && history.number !== null ? "The service has no history of this worker." : more);
  }

  async function refresh() {
    if (performance.now() < askAgainAt) return;
    try {
      if (await history.update(now.fleet?.history_number, now.hello?.started_at)) draw();
    } catch (error) {
      askAgainAt = performance.now() + ASK_AGAIN_MS;
      setText(note, `The history cannot be read: ${error.message}`);
    }
  }

  function show() {
    const { params } = route();
    const worker = params.get("worker") || null;
    by.value = worker || params.get("by") === "worker" ? "worker" : params.get("by") === "model" ? "model" : "";
    choice.root.hidden = by.value !== "worker";
    choice.input.value = worker ?? "";
    for (const node of [back, requests]) setAttr(node, "hidden", worker ? null : "");
    setAttr(requests, "href", address("request", { worker }));
    if (worker !== history.worker) {
      history.clear(worker);
      askAgainAt = 0;
    }
    draw();
    if (now.fleet) refresh();
  }

  on("fleet", (fleet) => {
    if (!fleet || root.closest("[hidden]")) return;
    choice.update(fleet.workers.map((each) => each.worker));
    refresh();
  });
  return { root, show };
}
