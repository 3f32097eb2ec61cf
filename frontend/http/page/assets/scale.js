// Colours for a share that is compared with an even one: colder is less, warmer is more.

import { colour } from "./theme.js";

/** Shares from an eighth of an even one to eight times as much have colours of their own. */
export const MAX_DOUBLINGS = 3;
const STEPS = 24;

const parts = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
const mixed = (a, b, share) => `rgb(${a.map((each, index) => Math.round(each + (b[index] - each) * share)).join(" ")})`;

/** The colours as the theme has them now: `of(times)` for a share in times of an even one; 0 has its own. */
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
