// The view of the fleet: its numbers, workers, queues, desired states and commands.

import { actButtons } from "./act.js";
import { el, fillMark, keyed, mark, setAttr, setText, timeOf } from "./dom.js";
import { clock, compareNames, count, duration, NONE, plural, rate, version } from "./format.js";
import { ledgersPanel } from "./ledgers.js";
import { on } from "./store.js";
import { stateOf, stateOrder, workersTable } from "./workers.js";

/** Limit on versions that the tile names. Older versions are counted together. */
const MAX_VERSIONS = 3;

/** Return pairs of a value and the number of workers that have it. */
function tally(workers, valueOf) {
  const found = new Map();
  for (const worker of workers) found.set(valueOf(worker), (found.get(valueOf(worker)) ?? 0) + 1);
  return [...found];
}

const sum = (rows, valueOf) => rows.reduce((all, row) => all + (valueOf(row) ?? 0), 0);

function tile(title, testid) {
  const value = el("p", { class: "tile-value", data: { testid: `${testid}-value` } });
  const more = el("p", { class: "tile-more" });
  return { root: el("section", { class: "tile", data: { testid } }, el("h2", { text: title }), value, more), value, more };
}

/** Make the tiles. */
function fleetTiles() {
  const [workers, tokens, waiting, flight, versions] = [tile("Workers serving", "tile-workers"), tile("Tokens per second", "tile-tokens"), tile("Waiting in the queue", "tile-waiting"), tile("In flight", "tile-in-flight"), tile("Weights", "tile-versions")];
  const bar = el("div", { class: "state-bar", "aria-hidden": "true" });
  const list = el("ul", { class: "state-list" });
  workers.more.replaceWith(bar, list);
  const all = [workers, tokens, waiting, flight, versions];
  return {
    root: el("div", { class: "tiles" }, ...all.map(({ root }) => root)),
    update({ workers: rows, queues, queue_problems: problems }) {
      const states = tally(rows, ({ state }) => state).sort((a, b) => stateOrder(a[0]) - stateOrder(b[0]));
      setText(workers.value, `${count(rows.filter(({ state }) => state === "serving").length)} of ${count(rows.length)}`);
      keyed(bar, states, ([name]) => name, () => el("span"), (node, [name, number]) => {
        setAttr(node, "data-kind", stateOf(name).kind);
        node.style.flexGrow = String(number);
      });
      keyed(list, states, ([name]) => name, () => mark("li"), (node, [name, number]) => {
        const { words, sign, kind } = stateOf(name);
        fillMark(node, kind, sign, `${count(number)} ${words}`);
      });
      const rates = rows.filter(({ tokens_per_s: each }) => each !== null);
      const serving = rates.filter(({ state }) => state === "serving");
      setText(tokens.value, rates.length ? rate(sum(rates, (row) => row.tokens_per_s)) : NONE);
      setText(tokens.more, serving.length ? `${rate(sum(serving, (row) => row.tokens_per_s) / serving.length)} for each serving worker` : "no rates yet");
      setText(waiting.value, count(sum(queues, (queue) => queue.waiting)));
      const unread = Object.keys(problems ?? {}).length;
      setText(waiting.more, unread ? `${plural(unread, "queue")} cannot be read` : `${count(sum(queues, (queue) => queue.in_hand))} delivered, not acked`);
      // A starting worker announces neither its slots nor its weights.
      const ready = rows.filter(({ state }) => state !== "starting");
      const slots = sum(ready, (row) => row.slots);
      setText(flight.value, count(sum(rows, (row) => row.in_flight)));
      setText(flight.more, `of ${plural(slots, "slot")}, ${count(sum(rows, (row) => row.waiting))} waiting in engines`);
      const found = tally(ready, (row) => row.weight_version).sort((a, b) => (b[0] ?? -1) - (a[0] ?? -1));
      setText(versions.value, found.length === 0 ? NONE : found.length === 1 ? version(found[0][0]) : `${version(found[0][0])} + ${count(found.length - 1)} older`);
      const named = found.slice(0, MAX_VERSIONS).map(([name, number]) => `${version(name)} × ${count(number)}`);
      if (found.length > MAX_VERSIONS) named.push(`older × ${count(sum(found.slice(MAX_VERSIONS), ([, number]) => number))}`);
      setText(versions.more, found.length > 1 ? named.join("  ") : found.length ? "all workers" : "");
    },
  };
}

/** Limit on named workers or clients. The others are counted. */
const MAX_NAMED = 5;

function fact(title, testid) {
  const value = el("dd", { data: { testid } });
  return { value, nodes: [el("dt", { text: title }), value] };
}

function modelCard() {
  const name = el("h3");
  const facts = { pause: fact("Pause", "told-pause"), weights: fact("Weights", "told-weights"), epoch: fact("Epoch", "told-epoch") };
  const [words, since] = [el("span"), el("time")];
  const behind = el("ul", { class: "behind", data: { testid: "behind" } });
  const done = el("p", { class: "tile-more" });
  const holders = el("ul", { class: "behind", data: { testid: "holders" } });
  facts.pause.value.append(words, " ", since);
  return {
    root: el("article", { class: "card" }, name, el("dl", { class: "facts" }, ...Object.values(facts).flatMap(({ nodes }) => nodes)), holders, done, behind),
    update({ told, workers }) {
      setText(name, told.model);
      setText(words, told.pause ? `${told.pause}, since` : "none");
      setAttr(facts.pause.value, "data-kind", told.pause ? "held" : null);
      since.hidden = !told.pause || !told.paused_since;
      if (told.paused_since) timeOf(since, told.paused_since, clock(told.paused_since));
      setText(facts.weights.value, `${version(told.weight_version)}${told.label ? ` “${told.label}”` : ""}`);
      setText(facts.epoch.value, told.epoch === null ? NONE : count(told.epoch));
      keyed(holders, holderLines(told), (text) => text, () => el("li"), setText);
      const late = told.behind;
      setText(done, !told.epoch ? "No command is recorded." : late.length ? `${plural(late.length, "worker")} of ${count(workers)} ${late.length === 1 ? "has" : "have"} not reached it:` : workers === 0 ? "There are no workers." : workers === 1 ? "The one worker has reached it." : `All ${count(workers)} workers have reached it.`);
      const named = late.slice(0, MAX_NAMED).map(({ worker, why }) => [worker, why]);
      if (late.length > MAX_NAMED) named.push(["", `and ${plural(late.length - MAX_NAMED, "more worker")}`]);
      keyed(behind, named, ([worker]) => worker, () => el("li", {}, el("strong"), " ", el("span")), (item, [worker, why]) => {
        setText(item.firstElementChild, worker);
        setText(item.lastElementChild, why);
      });
    },
  };
}

/** Name who stopped workers, and who has an open transfer of weights. */
function holderLines({ stops, transfers }) {
  return [
    ...(stops ?? []).map(({ worker, what, by, since }) => `${worker ?? "all workers"}: ${what}${by ? ` by ${by}` : ""}${since ? `, since ${clock(since)}` : ""}`),
    ...(transfers ?? []).map(({ by, age_s, chunks, workers }) => `${plural(workers, "worker")}: transfer of weights by ${by}, open for ${duration(age_s)}, ${plural(chunks, "chunk")}`),
  ];
}

/** Make the panel with the desired state of each model. */
function toldPanel() {
  const list = el("div", { class: "cards" });
  const none = el("p", { class: "empty", hidden: true, text: "No model has a desired state, and there are no workers." });
  return {
    root: el("section", { class: "panel", "aria-labelledby": "told-title", data: { testid: "told" } }, el("div", { class: "panel-head" }, el("h2", { id: "told-title", text: "Desired state" })), list, none),
    update({ models, workers }) {
      none.hidden = models.length > 0;
      const items = models.map((told) => ({ told, workers: workers.filter(({ model }) => model === told.model).length }));
      keyed(list, items, ({ told }) => told.model, modelCard);
    },
  };
}

function clientWords(clients) {
  if (!clients) return NONE;
  const all = Object.entries(clients).filter(([, number]) => number > 0).sort((a, b) => b[1] - a[1] || compareNames(a[0], b[0]));
  const named = all.slice(0, MAX_NAMED).map(([name, number]) => `${name} ${count(number)}`);
  if (all.length > MAX_NAMED) named.push(`${plural(all.length - MAX_NAMED, "other")} ${count(all.slice(MAX_NAMED).reduce((sum, [, number]) => sum + number, 0))}`);
  return named.join(", ");
}

/** Make the panel with the queue by model and lane, with its clients. */
function queuePanel() {
  const body = el("tbody");
  const none = el("p", { class: "empty", hidden: true, text: "There are no queues." });
  const problems = el("ul", { class: "behind" });
  const heads = [["Model", ""], ["Lane", ""], ["Waiting", "numeric"], ["Not acked", "numeric"], ["By client", ""]];
  const table = el("table", { class: "plain", "aria-label": "Queue by lane", data: { testid: "queues" } }, el("thead", {}, el("tr", {}, ...heads.map(([text, name]) => el("th", { scope: "col", class: name, text })))), body);
  return {
    root: el("section", { class: "panel", "aria-labelledby": "queue-title" }, el("div", { class: "panel-head" }, el("h2", { id: "queue-title", text: "Queue" })), el("div", { class: "scroll-x" }, table), none, problems),
    update({ queues, queue_problems: unread }) {
      none.hidden = queues.length > 0;
      table.hidden = queues.length === 0;
      keyed(body, queues, ({ model, lane }) => `${model}\n${lane}`, () => el("tr", {}, el("th", { scope: "row" }), el("td"), el("td", { class: "numeric" }), el("td", { class: "numeric" }), el("td", { class: "wide" })), (row, queue) => {
        const clients = clientWords(queue.clients);
        [queue.model, queue.lane, count(queue.waiting), count(queue.in_hand), clients].forEach((text, index) => setText(row.children[index], text));
        setAttr(row.lastElementChild, "title", clients);
        row.classList.toggle("dim", !queue.waiting && !queue.in_hand);
      });
      keyed(problems, Object.entries(unread ?? {}), ([model]) => model, () => el("li"), (item, [model, why]) => setText(item, `${model}: ${why}`));
    },
  };
}

/** Make the view. */
export function fleetView() {
  const parts = { tiles: fleetTiles(), told: toldPanel(), queue: queuePanel(), ledgers: ledgersPanel(), workers: workersTable() };
  parts.workers.root.firstElementChild.append(actButtons(parts.workers));
  const root = el("div", { class: "view" }, parts.tiles.root, parts.workers.root, el("div", { class: "columns" }, parts.ledgers.root, el("div", { class: "stack" }, parts.told.root, parts.queue.root)));
  on("fleet", (fleet) => {
    if (fleet && root.isConnected && !root.closest("[hidden]")) for (const part of Object.values(parts)) part.update(fleet);
  });
  return { root, show: (fleet) => fleet && Object.values(parts).forEach((part) => part.update(fleet)) };
}
