// Asks for the bearer token.

import { openDialog } from "./dialog.js";
import { el } from "./dom.js";
import { setToken, token } from "./session.js";

let open = null;

/** Ask for a token; `why` says what for. `onToken()` is called once one is given, or the old one is forgotten. */
export function askForToken(why, onToken) {
  if (open) return;
  open = openDialog("Token", "token-dialog", (body, close) => {
    const input = el("input", { type: "password", id: "token-input", name: "token", autocomplete: "off", spellcheck: "false", data: { testid: "token-input" } });
    const done = (value) => {
      setToken(value);
      close();
      onToken();
    };
    const forget = el("button", { type: "button", class: "quiet", text: "Forget the token", on: { click: () => done("") } });
    const form = el(
      "form",
      { on: { submit: (event) => (event.preventDefault(), done(input.value.trim())) } },
      el("p", { text: why }),
      el("label", { for: input.id, text: "Bearer token" }),
      input,
      el("p", { class: "hint", text: "It stays in this tab and is forgotten when the tab is closed." }),
      el("div", { class: "dialog-end" }, token() ? forget : null, el("button", { type: "button", text: "Cancel", on: { click: close } }), el("button", { type: "submit", class: "primary", text: "Use it", data: { testid: "token-submit" } })),
    );
    body.append(form);
  }, () => (open = null));
}
