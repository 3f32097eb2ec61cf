// The bearer token, and requests that carry it. The token is in this tab's sessionStorage and in no address.

const KEY = "rollbus-token";

/** An answer of status 400 and above. */
export class HttpProblem extends Error {
  constructor(status, message, code, body) {
    super(message);
    this.status = status;
    this.code = code;
    this.body = body;
  }
}

export const token = () => sessionStorage.getItem(KEY);

/** Keep a token until this tab is closed; an empty one is removed. */
export function setToken(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Ask the service. `path` is relative to the page; `body` is sent as JSON. Raises `HttpProblem`. */
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
    // A proxy in between answers in its own words.
  }
  const error = said?.error ?? {};
  throw new HttpProblem(answer.status, error.message ?? `the service answered ${answer.status}`, error.code ?? null, said);
}
