// The list of requests at the workers: running, slowest, failed or resumed.

import { el, setAttr, setText } from "./dom.js";
import { NONE, clock, compareNames, count, duration, plural, shortened } from "./format.js";
import { address, route, setParams } from "./router.js";
import { ask } from "./session.js";
import { now, on } from "./store.js";
import { VirtualTable, textCell, wrappedPx } from "./table.js";
import { nameChoice } from "./throughput.js";
import { phasesOf } from "./timeline.js";

/** The lists, and the column by which the workers choose the requests of each. */
const LISTS = { __proto__: null, running: "idle", slowest: "seconds", failed: "at", resumed: "at" };
/** Limit on listed requests, the largest that the service allows. */
const LIMIT = 256;
/** Time from an answer to the next read. */
const AGAIN_MS = 2000;
/** Limit on named workers. The others are counted. */
const MAX_NAMED = 5;

/** Name the workers that did not answer; empty if all did. */
export function silentWords(silent) {
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
export function requestList() {
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

  function say(words) {
    setText(problem, words);
    problem.hidden = !words;
  }

  async function read() {
    const { signal } = (run = new AbortController());
    nextAt = Infinity;
    try {
      const { timelines, workers_answered: answered, silent, left_out: more } = await (await ask(`v1/rl/request_list?${shown}`, { signal })).json();
      if (signal.aborted) return;
      setText(found, `${count(timelines.length)}${more ? ` of ${count(timelines.length + more)}` : ""} at ${plural(answered, "worker")}`);
      const missing = silentWords(Object.keys(silent));
      say(missing && `${missing}: their requests are missing.`);
      table.setRows(timelines.map(rowOf));
    } catch (error) {
      if (signal.aborted) return;
      say(`The list cannot be read: ${error.message}`);
    }
    nextAt = performance.now() + AGAIN_MS;
  }

  function refresh() {
    if (!now.hello || performance.now() < nextAt) return;
    if (now.hello.may_trace) read();
    else say("The list of requests needs the token of admins.");
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
