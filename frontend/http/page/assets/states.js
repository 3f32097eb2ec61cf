// States of workers, each with a sign, a kind of colour and a sentence. Colour is never the only sign of a state.

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
