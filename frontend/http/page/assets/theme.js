// Light or dark theme, from the system's setting or from the button.

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
