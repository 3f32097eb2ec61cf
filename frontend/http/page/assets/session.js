// The bearer token, its dialog, and requests with it. It is in this tab's sessionStorage, and never in an address.

import { el, openDialog } from "./dom.js";

const KEY = "rollbus-token";

/** An answer with status 400 or above. */
export class HttpProblem extends Error {
  constructor(status, message, code, body) {
    super(message);
    this.status = status;
    this.code = code;
    this.body = body;
  }
}

export const token = () => sessionStorage.getItem(KEY);

/** Store a token until this tab is closed. An empty token removes the stored token. */
function setToken(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Send a request to the service. `path` is relative to the page; `body` is sent as JSON. Raises `HttpProblem`. */
export async function ask(path, { method = "GET", body, signal, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "same-origin",
    redirect: "error",
  });
  if (answer.status < 400) return answer;
  let said = null;
  try {
    said = await answer.json();
  } catch {
    // A proxy may answer without JSON.
  }
  const error = said?.error ?? {};
  throw new HttpProblem(answer.status, error.message ?? `the service answered ${answer.status}`, error.code ?? null, said);
}

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
