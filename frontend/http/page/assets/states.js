// States of workers: a sign, a kind of colour and a sentence for each. Colour is never alone.

const STATES = {
  serving: ["●", "good", "Takes requests."],
  starting: ["◌", "busy", "The engine loads or warms up."],
  updating: ["◐", "busy", "Brings itself to what is desired: weights, adapters, pause."],
  paused: ["Ⅱ", "held", "Paused by a command. Requests wait in the queue."],
  asleep: ["☾", "held", "Asleep by a command. The engine has given up its memory."],
  drained: ["○", "off", "Drained by a command. Its requests went to others."],
  stopped: ["□", "off", "Has shut down in order."],
  waiting_for_weights: ["△", "warn", "Waits for the next update: its weights cannot be had again."],
  outdated: ["△", "warn", "Could not get the desired weights. It serves nothing."],
  poisoned: ["✕", "bad", "Its weights are half written or wrong. It serves nothing."],
  fenced: ["✕", "bad", "Its lease ran out. It gave up all that it had."],
  failed: ["✕", "bad", "The engine died. The process is about to exit."],
};
const ORDER = Object.keys(STATES);

/** Sign, kind and sentence of a state; of one that a newer worker has, the sign of a question. */
export function stateOf(name) {
  const [sign, kind, sentence] = STATES[name] ?? ["?", "warn", ""];
  return { name, words: name.replaceAll("_", " "), sign, kind, sentence };
}

/** Where a state stands among others. */
export const stateOrder = (name) => (ORDER.indexOf(name) + 1 || ORDER.length + 1);
