// The view of the fleet: workers, queues, desired states and commands.

import { actButtons } from "./act.js";
import { el } from "./dom.js";
import { ledgersPanel } from "./ledgers.js";
import { on } from "./store.js";
import { fleetTiles } from "./tiles.js";
import { queuePanel, toldPanel } from "./told.js";
import { workersTable } from "./workers.js";

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
