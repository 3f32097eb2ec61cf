// The light or dark theme, and the colours of a share relative to an even share.

const KEY = "rollbus-theme";
const SIGNS = { auto: "◐ auto", light: "○ light", dark: "● dark" };
const NEXT = { auto: "dark", dark: "light", light: "auto" };
const changed = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Call `listener` when colours change, because a canvas keeps its old colours until it is drawn again. */
export const onTheme = (listener) => changed.add(listener);

/** Return one of the style's colours in a form that a canvas accepts. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

function tell() {
  for (const listener of changed) listener();
}

/** Make a button switch the theme. */
export function startTheme(button) {
  let theme = localStorage.getItem(KEY) in SIGNS ? localStorage.getItem(KEY) : "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Theme: ${theme}`);
    tell();
  };
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(KEY, theme);
    show();
  });
  dark.addEventListener("change", tell);
  show();
}

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
