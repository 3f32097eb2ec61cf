// The states of workers, and the table of workers. Colour is never the only sign of a state.

import { el, fillMark, mark, meter, setAttr, setText } from "./dom.js";
import { bytes, compareNames, count, duration, percent, rate, version } from "./format.js";
import { address, route, setParams } from "./router.js";
import { textCell, VirtualTable, wrappedPx } from "./table.js";

const STATES = {
  serving: ["●", "good", "Accepts requests."],
  starting: ["◌", "busy", "The engine loads or warms up."],
  updating: ["◐", "busy", "Applies the desired state: weights, adapters, pause."],
  paused: ["Ⅱ", "held", "Paused by a command. Requests wait in the queue."],
  asleep: ["☾", "held", "Asleep by a command. The engine has released its memory."],
  drained: ["○", "off", "Drained by a command. Other workers got its requests."],
  stopped: ["□", "off", "Has shut down normally."],
  waiting_for_weights: ["△", "warn", "Waits for the next update, because its weights can no longer be loaded."],
  outdated: ["△", "warn", "Could not load the desired weights. It serves no requests."],
  poisoned: ["✕", "bad", "Its weights are incomplete or wrong. It serves no requests."],
  fenced: ["✕", "bad", "Its lease expired. It ended all its requests."],
  failed: ["✕", "bad", "The engine died. The process is about to exit."],
};
const ORDER = Object.keys(STATES);

/** Return the sign, kind and sentence of a state. An unknown state, of a newer worker, has a question mark. */
export function stateOf(name) {
  const [sign, kind, sentence] = STATES[name] ?? ["?", "warn", ""];
  return { name, words: name.replaceAll("_", " "), sign, kind, sentence };
}

/** Return the position of a state in the sort order. */
export const stateOrder = (name) => (ORDER.indexOf(name) + 1 || ORDER.length + 1);

/** Age of the last presence from which the table shows it. Workers publish presence about every second. */
const LATE_S = 5;

/** Height of the rows on a phone: names and states are wrapped, and the last error has two lines below. */
const narrowPx = (rows) => wrappedPx(rows.flatMap(({ worker, state }) => [worker, state]), rows.some((row) => row.last_error) ? 2 : 0);

/** Return the progress of the weights that a worker stages or loads: a short text, a long text, and a share. */
function stagingOf(staging) {
  if (!staging) return { words: "", title: "", share: 0 };
  const { stage, done_bytes: done, total_bytes: total, version: to } = staging;
  const share = total ? done / total : 0;
  const name = `${stage}${to === null || to === undefined ? "" : ` ${version(to)}`}`;
  return { words: `${name} ${total ? percent(share) : bytes(done)}`, title: `${name}, ${bytes(done)}${total ? ` of ${bytes(total)}` : ""}`, share };
}

/** Return that a worker is lent, and the rest of the term. */
const loanOf = (row) => (row.loan_left_s ? `lent, ${duration(row.loan_left_s)} left` : "");

function nameCell(td) {
  const link = el("a", { class: "name" });
  const role = el("span", { class: "role" });
  const error = el("span", { class: "error below" });
  td.append(link, role, error);
  return (row) => {
    setText(link, row.worker);
    setAttr(link, "href", address("throughput", { worker: row.worker }));
    setAttr(link, "title", `${row.worker}, incarnation ${row.incarnation}, up ${duration(row.uptime_s)}`);
    setText(role, row.role && row.role !== "both" ? row.role : "");
    setText(error, row.last_error ? `△ ${row.last_error}` : "");
  };
}

function stateCell(td) {
  const node = mark();
  td.append(node);
  return (row) => {
    const { words, sign, kind, sentence } = stateOf(row.state);
    fillMark(node, kind, sign, words);
    setAttr(td, "title", sentence);
  };
}

const meterCell = (share, words) => (td) => {
  const fill = meter(td);
  return (row) => fill(share(row), words(row));
};

function noteCell(td) {
  const fill = meter(td);
  const error = el("span", { class: "error" });
  td.append(error);
  return (row) => {
    const { words, title, share } = stagingOf(row.staging);
    // A lent worker stages nothing.
    const text = loanOf(row) || words;
    fill(share, text);
    td.firstElementChild.hidden = !text;
    setText(error, row.last_error ? `${text ? " " : ""}△ ${row.last_error}` : "");
    setAttr(td, "title", [loanOf(row), title, row.last_error].filter(Boolean).join("\n") || null);
  };
}

const lately = (row) => (row.seen_s_ago > LATE_S ? `${duration(Math.round(row.seen_s_ago))} ago` : "now");

const COLUMNS = [
  { id: "worker", title: "Worker", width: 176, narrow: 124, value: (row) => row.worker, compare: (a, b) => compareNames(a.worker, b.worker), cell: nameCell },
  { id: "state", title: "State", width: 112, narrow: 104, value: (row) => row.state, compare: (a, b) => stateOrder(a.state) - stateOrder(b.state), cell: stateCell },
  { id: "tokens_per_s", title: "Tokens/s", hint: "Generated tokens per second", width: 78, numeric: true, value: (row) => row.tokens_per_s, cell: textCell((row) => rate(row.tokens_per_s)) },
  { id: "model", title: "Model", width: 132, value: (row) => row.model, cell: textCell((row) => row.model, (row) => row.model) },
  { id: "weight_version", title: "Weights", hint: "Weight version", width: 70, numeric: true, value: (row) => row.weight_version, cell: textCell((row) => version(row.weight_version)) },
  { id: "in_flight", title: "In flight", hint: "Requests in flight, and slots of the engine", width: 112, numeric: true, value: (row) => row.in_flight, cell: meterCell((row) => (row.slots ? row.in_flight / row.slots : 0), (row) => `${count(row.in_flight)} / ${count(row.slots)}`) },
  { id: "waiting", title: "Waiting", hint: "Accepted requests that the engine has not started", width: 72, numeric: true, value: (row) => row.waiting, cell: textCell((row) => count(row.waiting)) },
  { id: "kv_use", title: "KV use", hint: "Used share of the KV cache", width: 104, numeric: true, value: (row) => row.kv_use, cell: meterCell((row) => row.kv_use, (row) => percent(row.kv_use)) },
  { id: "first_token_s", title: "First token", hint: "Mean time to the first token", width: 86, numeric: true, value: (row) => row.first_token_s, cell: textCell((row) => duration(row.first_token_s)) },
  { id: "between_tokens_s", title: "Between", hint: "Mean time between tokens", width: 76, numeric: true, value: (row) => row.between_tokens_s, cell: textCell((row) => duration(row.between_tokens_s)) },
  { id: "prefix_hit", title: "Prefix hits", hint: "Share of prompt tokens that the prefix cache had", width: 86, numeric: true, value: (row) => row.prefix_hit, cell: textCell((row) => percent(row.prefix_hit)) },
  { id: "note", title: "Staging, last error", hint: "Weights that are being staged or loaded, the rest of a loan, and the last error", width: 236, value: (row) => (row.last_error ?? (`${loanOf(row)}${row.staging ? `~${stagingOf(row.staging).words}` : ""}` || null)), cell: noteCell },
  { id: "seen", title: "Presence", hint: "Time of the last presence", width: 88, numeric: true, value: (row) => row.seen_s_ago, cell: textCell(lately, (row) => `${duration(row.seen_s_ago)} ago`) },
];

const matches = (row, words) => words.every((word) => [row.worker, row.model, row.state, row.role ?? "", row.last_error ?? "", version(row.weight_version)].some((text) => text.toLowerCase().includes(word)));

/** Make the table with its filter. `shown()` returns the workers that match the filter. */
export function workersTable() {
  const { params } = route();
  const filter = el("input", { type: "search", id: "worker-filter", placeholder: "name, state, model, v12, error", spellcheck: "false", autocomplete: "off", data: { testid: "worker-filter" } });
  const found = el("span", { class: "hint", role: "status", data: { testid: "worker-count" } });
  let all = [];
  let shown = [];
  const down = params.get("sort")?.startsWith("-") ?? false;
  const wanted = params.get("sort")?.replace(/^-/, "");
  const table = new VirtualTable({
    columns: COLUMNS,
    keyOf: (row) => row.worker,
    narrowPx,
    label: "Workers",
    testid: "workers",
    empty: () => (all.length ? "No worker matches the filter." : "There are no workers."),
    sort: { id: COLUMNS.some(({ id }) => id === wanted) ? wanted : "worker", down },
    onSort: (sort) => setParams({ sort: sort.id === "worker" && !sort.down ? "" : `${sort.down ? "-" : ""}${sort.id}` }),
  });
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = words.length ? all.filter((row) => matches(row, words)) : all;
    setText(found, words.length ? `${count(shown.length)} of ${count(all.length)}` : "");
    table.setRows(shown);
  };
  filter.value = params.get("q") ?? "";
  filter.addEventListener("input", () => {
    setParams({ q: filter.value });
    show();
  });
  const root = el("section", { class: "panel", "aria-labelledby": "workers-title" },
    el("div", { class: "panel-head" }, el("h2", { id: "workers-title", text: "Workers" }), el("label", { class: "filter" }, el("span", { class: "visually-hidden", text: "Filter workers" }), filter), found),
    table.root);
  return {
    root,
    shown: () => shown,
    isFiltered: () => filter.value.trim() !== "",
    update(fleet) {
      all = fleet.workers;
      const hasSeveral = new Set(all.map(({ model }) => model)).size > 1;
      table.showColumns(({ id }) => id !== "model" || hasSeveral);
      show();
    },
  };
}
