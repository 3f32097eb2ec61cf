// The view of requests: their list, and the history of one, from the workers that had it.

import { el, setAttr, setText } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { requestList, silentWords } from "./requests.js";
import { address, route } from "./router.js";
import { ask, askForToken } from "./session.js";
import { drawTimelines, listOf, nameOf } from "./timeline.js";

function legendOf() {
  const kinds = [["wait", "queue and admission"], ["prefill", "prompt"], ["decode", "tokens"], ["held", "held by a pause"]];
  return el("ul", { class: "legend" }, ...kinds.map(([kind, words]) => el("li", {}, el("span", { class: `swatch phase-${kind}`, "aria-hidden": "true" }), el("span", { text: words }))));
}

function attempt(timeline, first) {
  const { worker, events, client, lane, prompt_tokens: prompt, traceparent } = timeline;
  const isLost = events[0].event === "lost";
  const facts = isLost ? [`client ${client}`] : [`client ${client}`, lane ? `lane ${lane}` : "placed at this worker", `${count(prompt)} prompt tokens`];
  if (traceparent) facts.push(`trace ${traceparent.split("-")[1] ?? traceparent}`);
  return el("article", { class: "attempt", data: { testid: "attempt" } }, el("h3", { text: `${nameOf(timeline).replace("a", "A")} at ${worker || "no worker"}` }), el("p", { class: "hint", text: facts.join(", ") }), listOf(timeline, first));
}

function found(body, room) {
  const timelines = body.timelines.map((each) => ({ number: (each.attempt ?? 0) + 1, child: 0, prompt_tokens: 0, events: [], ...each })).filter(({ events }) => events.length).sort((a, b) => a.events[0].at - b.events[0].at);
  if (!timelines.length) return [el("p", { class: "empty", text: "The workers know the request, but have no events of it." })];
  const all = timelines.flatMap(({ events }) => events.map(({ at }) => at));
  const [first, last] = [Math.min(...all), Math.max(...all)];
  const attempts = new Set(timelines.map(({ client, child, number }) => `${client} ${child} ${number}`)).size;
  const workers = new Set(timelines.map(({ worker }) => worker)).size;
  return [
    el("section", { class: "panel", "aria-labelledby": "request-title", data: { testid: "request-found" } },
      el("div", { class: "panel-head" }, el("h2", { id: "request-title", text: body.request_id }), el("span", { class: "hint", text: `${plural(attempts, "attempt")} at ${plural(workers, "worker")}, ${duration(last - first)}; ${count(body.workers_answered)} of ${plural(body.workers_asked, "worker")} answered.` })),
      el("div", { class: "panel-body" }, ...caveats(body).map((text) => el("p", { class: "hint", text })), legendOf(), el("div", { class: "scroll-x" }, drawTimelines(timelines, room)))),
    el("section", { class: "panel", "aria-label": "Events" }, ...timelines.map((each) => attempt(each, first))),
  ];
}

/** Return sentences about missing or inexact data. */
function caveats({ silent, left_out: leftOut, clock_skews: skews }) {
  const found = [];
  if (silent.length) found.push(`${silentWords(silent)}: their part of the request is missing.`);
  if (leftOut) found.push(`The answers leave out ${plural(leftOut, "earlier timeline")}, because they were too long.`);
  for (const [worker, seconds] of Object.entries(skews ?? {})) found.push(`The clock of ${worker} is at least ${duration(Math.abs(seconds))} ${seconds > 0 ? "ahead of" : "behind"} the server's clock. Times between machines are wrong by this amount.`);
  return found;
}

/** Make the view. */
export function requestView() {
  const input = el("input", { id: "request-id", type: "search", placeholder: "X-Request-Id, or the id of the answer", spellcheck: "false", autocomplete: "off", data: { testid: "request-id" } });
  const note = el("p", { class: "notice", role: "status", data: { testid: "request-note" }, hidden: true });
  const answer = el("div", { class: "view" });
  const go = (event) => {
    event.preventDefault();
    const to = address("request", { ...Object.fromEntries(route().params), id: input.value.trim() });
    if (to === location.hash) load(input.value.trim());
    else location.hash = to;
  };
  const list = requestList();
  const back = el("a", { text: "All requests", data: { testid: "request-back" } });
  const form = el("form", { class: "controls", on: { submit: go } }, back, el("label", { class: "choice grow" }, el("span", { text: "Request" }), input), el("button", { type: "submit", class: "primary", text: "Look up", data: { testid: "request-submit" } }));
  const root = el("div", { class: "view" }, list.root, form, note, answer);
  let shown = null;
  let run = null;

  function say(words) {
    setText(note, words);
    note.hidden = !words;
  }

  async function load(id) {
    shown = id;
    run?.abort();
    run = new AbortController();
    answer.replaceChildren();
    if (!id) return say("");
    say("Asking the workers …");
    try {
      const body = await (await ask(`v1/rl/requests?id=${encodeURIComponent(id)}`, { signal: run.signal })).json();
      if (shown !== id) return;
      say("");
      answer.replaceChildren(...found(body, answer.clientWidth - 30));
    } catch (error) {
      if (error.name === "AbortError" || shown !== id) return;
      say(error.status === 404 ? `No worker knows ${id}. The service answered: ${error.message}.` : `The request cannot be looked up: ${error.message}`);
      if (error.status === 401) askForToken("The history of a request needs the token of admins.", () => load(id));
    }
  }

  return {
    root,
    show() {
      const params = Object.fromEntries(route().params);
      const id = params.id ?? "";
      const hasFocus = list.root.contains(document.activeElement);
      list.root.hidden = Boolean(id);
      back.hidden = !id;
      setAttr(back, "href", address("request", { ...params, id: "" }));
      if (!id) list.show();
      else if (hasFocus) back.focus();
      if (id === shown) return;
      input.value = id;
      load(id);
    },
  };
}
