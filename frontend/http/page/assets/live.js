// The event stream of this page: its path, and the time of its last event.

import { put, takeEvent } from "./store.js";
import { EventStream } from "./stream.js";

const PATH = "v1/rl/events";

/** Time of the last `fleet` event, on this machine's clock. */
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

/** The model and worker whose experts are watched; null for none. */
let watched = null;

/** Also request the load of a model's experts, for all its workers or one. With null, stop this. */
export function watchExperts(model, worker = null) {
  if (watched?.model === model && watched?.worker === worker) return;
  if (!watched && !model) return;
  watched = model ? { model, worker } : null;
  put("experts", null);
  const query = new URLSearchParams(model ? { experts: model, ...(worker ? { worker } : {}) } : {});
  stream.restart(model ? `${PATH}?${query}` : PATH);
}
