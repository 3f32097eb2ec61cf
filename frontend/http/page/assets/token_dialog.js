// Asks for the bearer token.

import { openDialog } from "./dialog.js";
import { el } from "./dom.js";
import { setToken, token } from "./session.js";

let open = null;

/** Ask for a token; `why` is the reason. `onToken()` is called after a token is entered or the old token is removed. */
export function askForToken(why, onToken) {
  if (open) return;
  open = openDialog("Token", "token-dialog", (body, close) => {
    const input = el("input", { type: "password", id: "token-input", name: "token", autocomplete: "off", spellcheck: "false", data: { testid: "token-input" } });
    const done = (value) => {
      setToken(value);
      close();
      onToken();
    };
    const forget = el("button", { type: "button", class: "quiet", text: "Remove the token", on: { click: () => done("") } });
    const form = el(
      "form",
      { on: { submit: (event) => (event.preventDefault(), done(input.value.trim())) } },
      el("p", { text: why }),
      el("label", { for: input.id, text: "Bearer token" }),
      input,
      el("p", { class: "hint", text: "The token stays in this tab, and is removed when the tab is closed." }),
      el("div", { class: "dialog-end" }, token() ? forget : null, el("button", { type: "button", text: "Cancel", on: { click: close } }), el("button", { type: "submit", class: "primary", text: "Use token", data: { testid: "token-submit" } })),
    );
    body.append(form);
  }, () => (open = null));
}
