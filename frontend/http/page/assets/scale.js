// Colours for a share relative to an even share: colder is less, warmer is more.

import { colour } from "./theme.js";

/** The scale covers shares from an eighth of an even share to eight times an even share. */
export const MAX_DOUBLINGS = 3;
const STEPS = 24;

const parts = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
const mixed = (a, b, share) => `rgb(${a.map((each, index) => Math.round(each + (b[index] - each) * share)).join(" ")})`;

/** Return the colours of the current theme. `of(times)` is the colour of a share divided by an even share. */
export function shareScale() {
  const [cold, even, hot] = ["cold", "even", "hot"].map((name) => parts(colour(name)));
  const table = Array.from({ length: 2 * STEPS + 1 }, (_, index) => {
    const at = (index - STEPS) / STEPS;
    return at < 0 ? mixed(even, cold, -at) : mixed(even, hot, at);
  });
  const unused = colour("unused");
  return {
    unused,
    table,
    of: (times) => (times === 0 ? unused : table[Math.round((Math.min(1, Math.max(-1, Math.log2(times) / MAX_DOUBLINGS)) + 1) * STEPS)]),
  };
}
