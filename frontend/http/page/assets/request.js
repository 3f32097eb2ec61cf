// The view of requests: their list, and the history of one, from the workers that had it.

import { el, setAttr, setText, showText } from "./dom.js";
import { clock, compareNames, count, duration, NONE, plural, shortened } from "./format.js";
import { address, route, setParams } from "./router.js";
import { ask, askForToken } from "./session.js";
import { now, on } from "./store.js";
import { textCell, VirtualTable, wrappedPx } from "./table.js";
import { nameChoice } from "./throughput.js";
import { drawTimelines, listOf, nameOf, phasesOf } from "./timeline.js";

/** The lists, and the column by which the workers choose the requests of each. */
const LISTS = { __proto__: null, running: "idle", slowest: "seconds", failed: "at", resumed: "at" };
/** Limit on listed requests, the largest that the service allows. */
const LIMIT = 256;
/** Time from an answer to the next read. */
const AGAIN_MS = 2000;
/** Limit on named workers. The others are counted. */
const MAX_NAMED = 5;

/** Name the workers that did not answer; empty if all did. */
function silentWords(silent) {
  const named = silent.slice(0, MAX_NAMED).join(", ");
  return silent.length ? `No answer from ${named}${silent.length > MAX_NAMED ? ` and ${plural(silent.length - MAX_NAMED, "other")}` : ""}` : "";
}

function rowOf(timeline) {
  const { events, progress, given_id: given, request_id: id } = timeline;
  const last = events.at(-1);
  const states = { ended: last?.reason ?? "ended", held: `held by ${last?.reason ?? "a pause"}` };
  return {
    ...timeline,
    id: given || id,
    state: shortened(Object.hasOwn(states, last?.event) ? states[last.event] : (phasesOf(events).at(-1)?.words ?? NONE)),
    seconds: progress?.seconds ?? (last && last.at - events[0].at),
    idle: progress?.idle_s,
    tokens: progress ? progress.tokens : last?.tokens,
    at: last?.at,
  };
}

function idCell(td) {
  const link = el("a", { class: "name" });
  const sample = el("span", { class: "role" });
  td.append(link, sample);
  return (row) => {
    setText(link, shortened(row.id));
    setAttr(link, "href", address("request", { ...Object.fromEntries(route().params), id: row.id }));
    setAttr(link, "title", row.id);
    setText(sample, row.child ? `sample ${row.child}` : "");
  };
}

const COLUMNS = [
  { id: "request", title: "Request", width: 190, narrow: 124, value: (row) => row.id, compare: (a, b) => compareNames(a.id, b.id) || a.child - b.child, cell: idCell },
  { id: "state", title: "State", hint: "What the request does, or how it ended", width: 132, narrow: 104, value: (row) => row.state, cell: textCell((row) => row.state) },
  { id: "seconds", title: "Time", hint: "From the first event to the end, or until now", width: 84, numeric: true, value: (row) => row.seconds, cell: textCell((row) => duration(row.seconds)) },
  { id: "idle", title: "No token for", hint: "Time since the last token", width: 104, numeric: true, value: (row) => row.idle, cell: textCell((row) => duration(row.idle)) },
  { id: "tokens", title: "Tokens", hint: "Generated tokens", width: 76, numeric: true, value: (row) => row.tokens, cell: textCell((row) => count(row.tokens)) },
  { id: "worker", title: "Worker", width: 132, value: (row) => row.worker, compare: (a, b) => compareNames(a.worker, b.worker), cell: textCell((row) => row.worker) },
  { id: "client", title: "Client", width: 132, value: (row) => row.client, compare: (a, b) => compareNames(a.client, b.client), cell: textCell((row) => row.client) },
  { id: "number", title: "Attempt", hint: "Number of the attempt", width: 76, numeric: true, value: (row) => row.number, cell: textCell((row) => count(row.number)) },
  { id: "model", title: "Model", width: 132, value: (row) => row.model, cell: textCell((row) => row.model) },
  { id: "at", title: "Last event", hint: "Time of the last event, by the worker's clock", width: 96, numeric: true, value: (row) => row.at, cell: textCell((row) => (row.at ? clock(row.at) : NONE)) },
];

/** Make the list with its filters. `show()` reads the list that the address names. */
function requestList() {
  const shows = Object.keys(LISTS).map((name) => el("input", { type: "radio", name: "show", value: name, data: { testid: `show-${name}` }, on: { change: () => go({ show: name }) } }));
  const choices = ["Client", "Model", "Worker"].map((title) => {
    const name = title.toLowerCase();
    return { name, ...nameChoice(`request-${name}`, title, (value) => go({ [name]: value })) };
  });
  const found = el("span", { class: "hint", data: { testid: "request-count" } });
  const problem = el("p", { class: "notice", role: "status", data: { testid: "request-problem" }, hidden: true });
  const table = new VirtualTable({
    columns: COLUMNS,
    keyOf: (row) => [row.client, row.request_id, row.child, row.attempt, row.worker].join("\n"),
    narrowPx: (rows) => wrappedPx(rows.flatMap(({ id, child, state }) => [`${shortened(id)}${child ? ` sample ${child}` : ""}`, state])),
    label: "Requests",
    testid: "requests",
    empty: () => (found.textContent ? "No such request. Workers remember their open requests and the last 1,000 that ended. Requests in the queue are at no worker." : ""),
    sort: { id: LISTS.running, down: true },
  });
  const root = el("section", { class: "panel", "aria-labelledby": "requests-title" },
    el("div", { class: "panel-head" }, el("h2", { id: "requests-title", text: "Requests" }), el("fieldset", { class: "choice segments" }, el("legend", { class: "visually-hidden", text: "List" }), ...shows.map((input) => el("label", {}, input, el("span", { text: input.value })))), ...choices.map((each) => each.root), found),
    problem, table.root);
  let [shown, run, nextAt] = ["", null, 0];

  function go(changes) {
    setParams(changes);
    show();
  }

  async function read() {
    const { signal } = (run = new AbortController());
    nextAt = Infinity;
    try {
      const { timelines, workers_answered: answered, silent, left_out: more } = await (await ask(`v1/rl/request_list?${shown}`, { signal })).json();
      if (signal.aborted) return;
      setText(found, `${count(timelines.length)}${more ? ` of ${count(timelines.length + more)}` : ""} at ${plural(answered, "worker")}`);
      const missing = silentWords(Object.keys(silent));
      showText(problem, missing && `${missing}: their requests are missing.`);
      table.setRows(timelines.map(rowOf));
    } catch (error) {
      if (signal.aborted) return;
      showText(problem, `The list cannot be read: ${error.message}`);
    }
    nextAt = performance.now() + AGAIN_MS;
  }

  function refresh() {
    if (!now.hello || performance.now() < nextAt) return;
    if (now.hello.may_trace) read();
    else showText(problem, "The list of requests needs the token of admins.");
  }

  function show() {
    const { params } = route();
    const list = params.get("show") in LISTS ? params.get("show") : "running";
    const query = new URLSearchParams({ show: list, limit: LIMIT });
    for (const input of shows) input.checked = input.value === list;
    for (const { name, input } of choices) {
      input.value = params.get(name) ?? "";
      if (input.value) query.set(name === "worker" ? "workers" : name, input.value);
    }
    run?.abort();
    nextAt = 0;
    if (shown !== query.toString()) {
      shown = query.toString();
      setText(found, "");
      table.rows = [];
      table.sortAs({ id: LISTS[list], down: true });
    }
    refresh();
  }

  on("fleet", (fleet) => {
    if (!fleet || root.closest("[hidden]")) return;
    const clients = [...table.rows, ...fleet.queues.flatMap((queue) => Object.keys(queue.clients ?? {}).map((client) => ({ client })))];
    const known = { client: clients, model: fleet.models, worker: fleet.workers };
    for (const { name, update } of choices) update(known[name].map((each) => each[name]));
    refresh();
  });
  return { root, show };
}

function legendOf() {
  const kinds = [["wait", "queue and admission"], ["prefill", "prompt"], ["decode", "tokens"], ["held", "held by a pause"]];
  return el("ul", { class: "legend" }, ...kinds.map(([kind, words]) => el("li", {}, el("span", { class: `swatch phase-${kind}`, "aria-hidden": "true" }), el("span", { text: words }))));
}

function attempt(timeline, first) {
  const { worker, events, client, lane, prompt_tokens: prompt, traceparent } = timeline;
  const isLost = events[0].event === "lost";
  const facts = isLost ? [`client ${client}`] : [`client ${client}`, lane ? `lane ${lane}` : "placed at this worker", `${count(prompt)} prompt tokens`];
  if (traceparent) facts.push(`trace ${traceparent.split("-")[1] ?? traceparent}`);
  return el("article", { class: "attempt", data: { testid: "attempt" } }, el("h3", { text: `${nameOf(timeline).replace("a", "A")} at ${worker || "no worker"}` }), el("p", { class: "hint", text: facts.join(", ") }), listOf(timeline, first));
}

function found(body, room) {
  const timelines = body.timelines.map((each) => ({ number: (each.attempt ?? 0) + 1, child: 0, prompt_tokens: 0, events: [], ...each })).filter(({ events }) => events.length).sort((a, b) => a.events[0].at - b.events[0].at);
  if (!timelines.length) return [el("p", { class: "empty", text: "The workers know the request, but have no events of it." })];
  const all = timelines.flatMap(({ events }) => events.map(({ at }) => at));
  const [first, last] = [Math.min(...all), Math.max(...all)];
  const attempts = new Set(timelines.map(({ client, child, number }) => `${client} ${child} ${number}`)).size;
  const workers = new Set(timelines.map(({ worker }) => worker)).size;
  return [
    el("section", { class: "panel", "aria-labelledby": "request-title", data: { testid: "request-found" } },
      el("div", { class: "panel-head" }, el("h2", { id: "request-title", text: body.request_id }), el("span", { class: "hint", text: `${plural(attempts, "attempt")} at ${plural(workers, "worker")}, ${duration(last - first)}; ${count(body.workers_answered)} of ${plural(body.workers_asked, "worker")} answered.` })),
      el("div", { class: "panel-body" }, ...caveats(body).map((text) => el("p", { class: "hint", text })), legendOf(), el("div", { class: "scroll-x" }, drawTimelines(timelines, room)))),
    el("section", { class: "panel", "aria-label": "Events" }, ...timelines.map((each) => attempt(each, first))),
  ];
}

/** Return sentences about missing or inexact data. */
function caveats({ silent, left_out: leftOut, clock_skews: skews }) {
  const found = [];
  if (silent.length) found.push(`${silentWords(silent)}: their part of the request is missing.`);
  if (leftOut) found.push(`The answers leave out ${plural(leftOut, "earlier timeline")}, because they were too long.`);
  for (const [worker, seconds] of Object.entries(skews ?? {})) found.push(`The clock of ${worker} is at least ${duration(Math.abs(seconds))} ${seconds > 0 ? "ahead of" : "behind"} the server's clock. Times between machines are wrong by this amount.`);
  return found;
}

/** Make the view. */
export function requestView() {
  const input = el("input", { id: "request-id", type: "search", placeholder: "X-Request-Id, or the id of the answer", spellcheck: "false", autocomplete: "off", data: { testid: "request-id" } });
  const note = el("p", { class: "notice", role: "status", data: { testid: "request-note" }, hidden: true });
  const answer = el("div", { class: "view" });
  const go = (event) => {
    event.preventDefault();
    const to = address("request", { ...Object.fromEntries(route().params), id: input.value.trim() });
    if (to === location.hash) load(input.value.trim());
    else location.hash = to;
  };
  const list = requestList();
  const back = el("a", { text: "All requests", data: { testid: "request-back" } });
  const form = el("form", { class: "controls", on: { submit: go } }, back, el("label", { class: "choice grow" }, el("span", { text: "Request" }), input), el("button", { type: "submit", class: "primary", text: "Look up", data: { testid: "request-submit" } }));
  const root = el("div", { class: "view" }, list.root, form, note, answer);
  let shown = null;
  let run = null;

  async function load(id) {
    shown = id;
    run?.abort();
    run = new AbortController();
    answer.replaceChildren();
    if (!id) return showText(note, "");
    showText(note, "Asking the workers …");
    try {
      const body = await (await ask(`v1/rl/requests?id=${encodeURIComponent(id)}`, { signal: run.signal })).json();
      if (shown !== id) return;
      showText(note, "");
      answer.replaceChildren(...found(body, answer.clientWidth - 30));
    } catch (error) {
      if (error.name === "AbortError" || shown !== id) return;
      showText(note, error.status === 404 ? `No worker knows ${id}. The service answered: ${error.message}.` : `The request cannot be looked up: ${error.message}`);
      if (error.status === 401) askForToken("The history of a request needs the token of admins.", () => load(id));
    }
  }

  return {
    root,
    show() {
      const params = Object.fromEntries(route().params);
      const id = params.id ?? "";
      const hasFocus = list.root.contains(document.activeElement);
      list.root.hidden = Boolean(id);
      back.hidden = !id;
      setAttr(back, "href", address("request", { ...params, id: "" }));
      if (!id) list.show();
      else if (hasFocus) back.focus();
      if (id === shown) return;
      input.value = id;
      load(id);
    },
  };
}
