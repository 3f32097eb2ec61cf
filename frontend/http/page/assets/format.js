// Formats numbers, times and sizes as text.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const two = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const clockOf = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const dayOf = new Intl.DateTimeFormat(undefined, { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const byName = new Intl.Collator("en", { numeric: true });

/** Text of an unknown value. */
export const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** A whole number with separators: 12,345. */
export const count = (value) => (known(value) ? whole.format(value) : NONE);

/** A rate; values below 100 have one decimal place. */
export const rate = (value) => (!known(value) ? NONE : value >= 100 || value === 0 ? whole.format(value) : one.format(value));

/** A ratio: 1.25×. */
export const ratio = (value) => (!known(value) ? NONE : `${value >= 100 ? whole.format(value) : two.format(value)}×`);

/** A number with a fixed number of decimal places. */
export const decimals = (value, places) => (known(value) ? value.toFixed(places) : NONE);

/** A share as a percentage. A share just below 1 is `>99 %`, and a share just above 0 is `<1 %`. */
export function percent(value) {
  if (!known(value)) return NONE;
  const shown = Math.round(value * 100);
  if (shown === 100 && value < 1) return ">99 %";
  if (shown === 0 && value > 0) return "<1 %";
  return `${shown} %`;
}

/** Seconds as text: 182 ms, 1.24 s, 3 min 12 s, 2 h 5 min. */
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 0.00005) return "0 s";
  if (Number.isInteger(seconds) && seconds < 60) return `${seconds} s`;
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const all = Math.round(seconds);
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
}

/** Bytes: 1.2 GB. */
export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${one.format(value / size)} ${unit}`;
  }
  return `${whole.format(value)} B`;
}

/** A text, shortened in its middle if it is long. */
export const shortened = (text) => (text.length > 48 ? `${text.slice(0, 24)}…${text.slice(-23)}` : text);

/** "1 worker", "12 workers". */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** A time of this machine's clock, with the day if it is not today. */
export function clock(unix) {
  const at = new Date(unix * 1000);
  return at.toDateString() === new Date().toDateString() ? clockOf.format(at) : dayOf.format(at);
}

/** Compare names with numbers in numeric order: worker-2 before worker-10. */
export const compareNames = (a, b) => byName.compare(a, b);

/** A weight version. */
export const version = (value) => (known(value) ? `v${value}` : NONE);
