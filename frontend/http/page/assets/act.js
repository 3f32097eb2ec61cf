// Commands to the fleet. A dialog first shows the effect and the workers, then sends the command and shows the result.

import { el, openDialog, setAttr, setText, showText } from "./dom.js";
import { compareNames, count, duration, plural } from "./format.js";
import { stream } from "./live.js";
import { ask, askForToken, token } from "./session.js";
import { now, on } from "./store.js";

/** Limit on listed workers of a result. Workers that have not applied the command come first. */
const MAX_LINES = 100;
const NEEDS = "Commands need an admin token.";
const NOT_ADMINS = "The entered token is not an admin token.";

const sum = (workers) => workers.reduce((all, each) => all + each.in_flight, 0);

const PAUSE_MODES = [
  ["keep", "keep", (number) => `${plural(number, "request")} in flight stop, and continue after the resume.`],
  ["wait", "wait", (number) => `${plural(number, "request")} in flight finish first. The result arrives when no request is in flight.`],
  ["abort", "abort", (number) => `${plural(number, "request")} in flight end immediately with the tokens that they have.`],
];

const ACTS = [
  {
    name: "pause", verb: "Pause", title: "Pause", path: "v1/rl/pause", danger: true,
    says: (workers) => `${plural(workers.length, "worker")} will accept no more requests until the resume. New requests wait in the queue.`,
    fields: (workers) => choices("mode", "Requests in flight", PAUSE_MODES.map(([value, text, words]) => [value, text, words(sum(workers))])),
  },
  {
    name: "resume", verb: "Resume", title: "Resume", path: "v1/rl/resume",
    says: (workers) => `${plural(workers.length, "worker")} will accept requests again; ${count(workers.filter(({ state }) => ["paused", "drained"].includes(state)).length)} of them are paused or drained now. A resume ends pauses and drains.`,
  },
  {
    name: "flush", verb: "Flush the cache of", title: "Flush cache", path: "v1/rl/flush_cache",
    says: (workers) => `${plural(workers.length, "worker")} will empty their prefix caches. The next prompts are computed in full.`,
    fields: (workers) => choices("preempt", "Requests in flight", [["", "do not change them", `The command fails at workers with requests in flight; ${plural(workers.filter((each) => each.in_flight > 0).length, "worker")} have some.`], ["true", "compute them again", `The ${plural(sum(workers), "request")} in flight lose their cached tokens.`]]),
  },
  {
    name: "drain", verb: "Drain", title: "Drain", path: "v1/rl/drain", danger: true,
    // A drain of all workers would leave no worker for the requests.
    needsChoice: true,
    says: (workers) => `${plural(workers.length, "worker")} will hand ${plural(sum(workers), "request")} in flight to other workers, and accept no more until the resume.`,
    warns: (workers) => {
      const chosen = new Set(workers.map(({ worker }) => worker));
      const left = new Set(now.fleet.workers.filter(({ worker, state }) => state === "serving" && !chosen.has(worker)).map(({ model }) => model));
      const without = [...new Set(workers.map(({ model }) => model))].filter((model) => !left.has(model));
      return without.length ? `No other worker serves ${without.join(", ")}: its requests would have no worker.` : "";
    },
  },
];

function choices(name, title, options) {
  const inputs = options.map(([value, text, words], index) => el("label", { class: "option" }, el("input", { type: "radio", name, value, checked: index === 0, data: { testid: `${name}-${value || "default"}` } }), el("span", {}, el("strong", { text }), " ", el("span", { class: "hint", text: words }))));
  return el("fieldset", { class: "options" }, el("legend", { text: title }), ...inputs);
}

/** The possible targets of a command, as `[value, text, workers, fields of the body]`. */
function targets(act, shown) {
  const workers = now.fleet.workers;
  const found = [];
  if (!act.needsChoice) found.push(["all", `all ${plural(workers.length, "worker")}`, workers, {}]);
  if (shown) found.push(["filter", `${plural(shown.length, "worker")} that the filter shows`, shown, { workers: shown.map(({ worker }) => worker) }]);
  if (act.needsChoice) {
    const sorted = [...workers].sort((a, b) => compareNames(a.worker, b.worker));
    return [...found, ...sorted.map((each) => [`worker ${each.worker}`, each.worker, [each], { workers: [each.worker] }])];
  }
  const models = [...new Set(workers.map(({ model }) => model))].sort(compareNames);
  if (models.length > 1) for (const model of models) found.push([`model ${model}`, `workers of ${model}`, workers.filter((each) => each.model === model), { model }]);
  return found;
}

function answerTable(ledger) {
  const rank = (line) => (line.result === "applied" ? 1 : 0);
  const lines = [...ledger.workers].sort((a, b) => rank(a) - rank(b) || compareNames(a.worker, b.worker));
  const rows = lines.slice(0, MAX_LINES).map((line) => el("tr", { data: { key: line.worker, result: line.result } }, el("th", { scope: "row", text: line.worker }), el("td", {}, el("span", { class: "state", data: { kind: line.result === "applied" ? "good" : "bad" } }, el("span", { class: "glyph", "aria-hidden": "true", text: line.result === "applied" ? "✓" : "✕" }), el("span", { text: line.result }))), el("td", { class: "numeric", text: line.seconds === null ? "" : duration(line.seconds) }), el("td", { class: "wide", text: line.why ?? "" })));
  if (lines.length > MAX_LINES) rows.push(el("tr", {}, el("td", { colspan: 4, text: `and ${count(lines.length - MAX_LINES)} more` })));
  const head = el("tr", {}, ...["Worker", "Result", "Took", "Why"].map((text) => el("th", { scope: "col", text, class: text === "Took" ? "numeric" : "" })));
  return el("div", { class: "scroller short" }, el("table", { class: "plain", "aria-label": "Result of each worker", data: { testid: "act-ledger" } }, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function showAnswer(body, act, ledger, problem, close) {
  const nodes = [];
  if (ledger?.workers) {
    const applied = ledger.workers.filter(({ result }) => result === "applied").length;
    nodes.push(el("p", { data: { testid: "act-result" }, text: `${act.title}: applied by ${count(applied)} of ${plural(ledger.workers.length, "worker")} in ${duration(ledger.seconds)}.` }), answerTable(ledger));
  }
  if (problem && !ledger?.workers) nodes.push(el("p", { class: "notice", data: { testid: "act-problem" }, text: problem }));
  body.replaceChildren(...nodes, el("div", { class: "dialog-end" }, el("button", { type: "button", class: "primary", text: "Close", data: { testid: "act-close" }, on: { click: close } })));
  body.querySelector("button:last-of-type").focus();
}

async function send(act, fields, body, close) {
  body.replaceChildren(el("p", { role: "status", text: `${act.title}: sent. Waiting for the workers …` }), el("p", { class: "hint", text: "You can close this dialog: the command continues and is shown under Commands." }), el("div", { class: "dialog-end" }, el("button", { type: "button", text: "Close", on: { click: close } })));
  try {
    showAnswer(body, act, await (await ask(act.path, { method: "POST", body: fields })).json(), null, close);
  } catch (error) {
    if (error.status === 401) {
      close();
      askForToken(NEEDS, () => stream.restart());
    } else showAnswer(body, act, error.body, error.message || "the service cannot be reached; it is unknown whether the command was sent", close);
  }
}

function askFirst(act, shown) {
  openDialog(act.title, "act-dialog", (body, close) => {
    if (shown && !shown.length) {
      body.append(el("p", { class: "notice", data: { testid: "act-says" }, text: "The filter shows no worker. Clear it to choose workers." }), el("div", { class: "dialog-end" }, el("button", { type: "button", text: "Close", data: { testid: "act-cancel" }, on: { click: close } })));
      return;
    }
    const all = targets(act, shown);
    const select = el("select", { id: "act-target", data: { testid: "act-target" } }, ...all.map(([value, words]) => el("option", { value, text: words })));
    if (shown) select.value = "filter";
    const says = el("p", { data: { testid: "act-says" } });
    const warns = el("p", { class: "notice" });
    const extra = el("div");
    const confirm = el("button", { type: "submit", class: act.danger ? "danger" : "primary", data: { testid: "act-confirm" } });
    let chosen = all[0];
    const say = () => {
      chosen = all.find(([value]) => value === select.value);
      const [, , workers] = chosen;
      setText(says, act.says(workers));
      showText(warns, act.warns?.(workers) ?? "");
      extra.replaceChildren(...(act.fields ? [act.fields(workers)] : []));
      setText(confirm, `${act.verb} ${plural(workers.length, "worker")}`);
    };
    select.addEventListener("change", say);
    say();
    const submit = (event) => {
      event.preventDefault();
      const fields = { ...chosen[3] };
      for (const [name, value] of new FormData(event.target)) if (value) fields[name] = value === "true" ? true : value;
      send(act, fields, body, close);
    };
    const scope = el("div", {}, el("label", { for: select.id, text: "Workers" }), select);
    body.append(el("form", { on: { submit } }, scope, says, warns, extra, el("div", { class: "dialog-end" }, el("button", { type: "button", text: "Cancel", data: { testid: "act-cancel" }, on: { click: close } }), confirm)));
  });
}

/** Make the buttons. `table` returns the workers that its filter shows. */
export function actButtons(table) {
  const why = el("span", { class: "hint", id: "act-why", data: { testid: "act-why" } });
  const buttons = ACTS.map((act) => el("button", { type: "button", text: `${act.title} …`, "aria-describedby": why.id, disabled: true, data: { testid: `act-${act.name}` }, on: { click: () => askFirst(act, table.isFiltered() ? table.shown() : null) } }));
  const give = el("button", { type: "button", class: "quiet", text: "Enter the token", hidden: true, on: { click: () => askForToken(NEEDS, () => stream.restart()) } });
  const update = () => {
    const mayAct = now.hello?.may_act ?? false;
    const reason = !now.hello ? "Not connected." : !mayAct ? (token() ? NOT_ADMINS : NEEDS) : !now.fleet?.bus_up ? "The service has no connection to NATS." : !now.fleet.workers.length ? "There are no workers." : "";
    for (const button of buttons) setAttr(button, "disabled", reason ? "" : null);
    give.hidden = !now.hello || mayAct;
    setText(why, reason);
  };
  on("hello", update);
  on("fleet", update);
  return el("div", { class: "acts", role: "group", "aria-label": "Commands to the fleet" }, ...buttons, why, give);
}
