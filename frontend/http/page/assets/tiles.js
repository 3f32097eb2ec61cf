// The fleet in five numbers.

import { el, keyed, setAttr, setText } from "./dom.js";
import { NONE, count, plural, rate, version } from "./format.js";
import { stateOf, stateOrder } from "./states.js";

/** Limit on versions that the tile names. Older versions are counted together. */
const MAX_VERSIONS = 3;

/** Return pairs of a value and the number of workers that have it. */
export function tally(workers, valueOf) {
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
export function fleetTiles() {
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
      keyed(list, states, ([name]) => name, () => el("li", { class: "state" }, el("span", { class: "glyph", "aria-hidden": "true" }), el("span")), (node, [name, number]) => {
        const { words, sign, kind } = stateOf(name);
        setAttr(node, "data-kind", kind);
        setText(node.firstElementChild, sign);
        setText(node.lastElementChild, `${count(number)} ${words}`);
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
