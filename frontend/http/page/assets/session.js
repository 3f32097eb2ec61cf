// The bearer token, and requests with this token. The token is in this tab's sessionStorage, and never in an address.

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
export function setToken(value) {
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
