// The newest event of each name, and its listeners.

const listeners = new Map();
const waiting = new Set();
let frame = 0;

/** The newest event of each name; null before the first one. `fleet.workers` are objects here. */
export const now = { hello: null, day: null, fleet: null, experts: null, link: { kind: "connecting" } };

/** Call `listener(value)` when `name` changes, at most once per drawn frame and not while the page is hidden. */
export function on(name, listener) {
  if (!listeners.has(name)) listeners.set(name, new Set());
  listeners.get(name).add(listener);
  return () => listeners.get(name).delete(listener);
}

/** Set the newest value of `name`. */
export function put(name, value) {
  now[name] = value;
  waiting.add(name);
  if (!frame && !document.hidden) frame = requestAnimationFrame(deliver);
}

function deliver() {
  frame = 0;
  const names = [...waiting];
  waiting.clear();
  for (const name of names) {
    for (const listener of listeners.get(name) ?? []) {
      try {
        listener(now[name]);
      } catch (error) {
        // An error in one view must not stop the others.
        console.error(error);
      }
    }
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && waiting.size && !frame) frame = requestAnimationFrame(deliver);
});

/** Store an event of the stream. */
export function takeEvent(name, value) {
  if (name === "fleet") {
    const fields = now.hello?.worker_fields ?? [];
    const workers = value.workers.map((row) => Object.fromEntries(fields.map((field, index) => [field, row[index]])));
    put("fleet", { ...value, workers });
  } else if (["hello", "day", "experts"].includes(name)) put(name, value);
}
