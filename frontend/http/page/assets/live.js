// The stream of this page: where it is read from, and when it was heard last.

import { put, takeEvent } from "./store.js";
import { EventStream } from "./stream.js";

const PATH = "v1/rl/events";

/** When the fleet was heard last, on this machine's clock. */
export const heard = { at: Date.now() };

/** The stream that feeds the page. */
export const stream = new EventStream(
  PATH,
  (name, value) => {
    if (name === "fleet") heard.at = Date.now();
    takeEvent(name, value);
  },
  (state) => put("link", state),
  (problem) => {
    if (watched) put("experts", { ...watched, problem });
    return PATH;
  },
);

/** Whose experts are watched; null: nobody's. */
let watched = null;

/** Have the load of a model's experts sent too, of all its workers or one; with null, no more. */
export function watchExperts(model, worker = null) {
  if (watched?.model === model && watched?.worker === worker) return;
  if (!watched && !model) return;
  watched = model ? { model, worker } : null;
  put("experts", null);
  const query = new URLSearchParams(model ? { experts: model, ...(worker ? { worker } : {}) } : {});
  stream.restart(model ? `${PATH}?${query}` : PATH);
}
