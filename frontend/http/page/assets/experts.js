// The view of the experts: how often each expert was chosen in the last minute, or before it, layer by layer.

import { el, keyed, setAttr, setText, showText } from "./dom.js";
import { clock, compareNames, count, decimals, duration, percent, plural, ratio } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { watchExperts } from "./live.js";
import { route, setParams } from "./router.js";
import { now, on } from "./store.js";
import { MAX_DOUBLINGS, onTheme, shareScale } from "./theme.js";
import { nameChoice } from "./throughput.js";

/** Number of busiest experts that a layer's line names. */
const NAMED = 3;

const heads = (names) => el("thead", {}, el("tr", {}, ...names.map(([text, hint, name]) => el("th", { scope: "col", class: name, text, title: hint }))));

const LAYER_HEADS = [
  ["Layer", null, "numeric"],
  ["Max / mean", "Load of the busiest expert divided by the mean load; 1.00× is even", "numeric"],
  ["Entropy", "1 is even; 0 means that one expert has all the load", "numeric"],
  ["Never chosen", "Experts that no token chose", "numeric"],
  ["Busiest experts", "With their load divided by an even share", ""],
];
const EXPERT_HEADS = [["Expert", null, "numeric"], ["Choices", null, "numeric"], ["Share", null, "numeric"], ["Of an even share", null, "numeric"]];

/** Make both tables, closed at first. `onLayer(layer)` is called when a layer is selected. */
function layerTables(onLayer) {
  const layerBody = el("tbody");
  const expertBody = el("tbody");
  const layers = el("details", { data: { testid: "layers-table" } }, el("summary", { text: "Layers as a table" }), el("div", { class: "scroller" }, el("table", { class: "plain", "aria-label": "Layers" }, heads(LAYER_HEADS), layerBody)));
  const title = el("summary", { text: "Experts of a layer as a table" });
  const experts = el("details", { data: { testid: "experts-table" } }, title, el("div", { class: "scroller" }, el("table", { class: "plain", "aria-label": "Experts of the layer" }, heads(EXPERT_HEADS), expertBody)));
  let shown = null;
  let map = null;
  let layer = 0;

  function busiest(at) {
    const { counts, experts: number } = shown;
    const own = Array.from(counts.subarray(at * number, (at + 1) * number), (value, expert) => [expert, value]);
    const best = own.sort((a, b) => b[1] - a[1]).slice(0, NAMED);
    return map.totals[at] ? best.map(([expert]) => `${expert} (${ratio(map.read({ layer: at, expert }).times)})`).join(", ") : "no tokens";
  }

  function fillLayers() {
    if (!shown || !layers.open) return;
    const { plane } = shown;
    const rows = plane.max_over_mean.map((_value, at) => at);
    keyed(layerBody, rows, (at) => at, (at) => el("tr", {}, el("th", { scope: "row", class: "numeric" }, el("button", { type: "button", class: "quiet", text: String(at), on: { click: () => onLayer(at) } })), ...["numeric", "numeric", "numeric", ""].map((name) => el("td", { class: name }))), (row, at) => {
      row.dataset.layer = at;
      [ratio(plane.max_over_mean[at]), decimals(plane.entropy[at], 3), count(plane.unused[at]), busiest(at)].forEach((text, index) => setText(row.children[index + 1], text));
      setAttr(row, "aria-current", at === layer ? "true" : null);
    });
  }

  function fillExperts() {
    setText(title, `Experts of layer ${layer} as a table`);
    if (!shown || !experts.open) return;
    keyed(expertBody, Array.from({ length: shown.experts }, (_, expert) => expert), (expert) => expert, (expert) => el("tr", {}, el("th", { scope: "row", class: "numeric", text: String(expert) }), ...["numeric", "numeric", "numeric"].map((name) => el("td", { class: name }))), (row, expert) => {
      const { number, share, times } = map.read({ layer, expert });
      Object.assign(row.dataset, { layer, expert, count: number });
      [count(number), share === null ? "–" : `${decimals(share * 100, 2)} %`, ratio(times)].forEach((text, index) => setText(row.children[index + 1], text));
    });
  }

  layers.addEventListener("toggle", fillLayers);
  experts.addEventListener("toggle", fillExperts);
  return {
    root: el("section", { class: "panel tables", "aria-label": "Load of experts as tables" }, layers, experts),
    showLayer(at) {
      layer = at;
      fillLayers();
      fillExperts();
    },
    update(data, heat) {
      shown = data;
      map = heat;
      layer = Math.min(layer, data.layers - 1);
      fillLayers();
      fillExperts();
    },
  };
}

const PLANES = { generated: "generated tokens", prompt: "prompt tokens" };

/** Decode counts: base64 of little-endian 32-bit numbers, which is also the byte order of common machines. */
function countsOf(text, length) {
  const found = new Uint32Array(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer);
  if (found.length !== length) throw new Error(`received ${found.length} counts, expected ${length}`);
  return found;
}

function legend() {
  const bar = el("span", { class: "scale-bar", "aria-hidden": "true" });
  const unused = el("span", { class: "scale-unused", "aria-hidden": "true" });
  const paint = () => {
    const scale = shareScale();
    bar.style.background = `linear-gradient(to right, ${scale.table.join(",")})`;
    unused.style.background = scale.unused;
  };
  onTheme(paint);
  queueMicrotask(paint);
  const most = 2 ** MAX_DOUBLINGS;
  return el("div", { class: "scale" }, el("span", { text: `Share: 1/${most} of even` }), bar, el("span", { text: `${most}× even` }), unused, el("span", { text: "never chosen" }));
}

/** Return of when the counts are, and the share of computed tokens that were counted. */
function seenWords({ computed, seen, kept, counted_at: at }) {
  if (!computed) return "no tokens";
  const when = kept === "version" ? "no tokens in the last minute; all of the newest weights: " : kept ? `no tokens since ${clock(at)}; the minute before: ` : "the last minute: ";
  return `${when}${percent(seen / computed)} of ${count(computed)} tokens seen`;
}

/** Make the view. */
export function expertsView() {
  const model = el("select", { id: "experts-model", data: { testid: "experts-model" }, on: { change: () => go({ model: model.value }) } });
  const worker = nameChoice("experts-worker", "Worker", (name) => go({ worker: name }));
  const planes = el("fieldset", { class: "choice segments" }, el("legend", { class: "visually-hidden", text: "Tokens" }));
  for (const [name, words] of Object.entries(PLANES)) planes.append(el("label", {}, el("input", { type: "radio", name: "plane", value: name, data: { testid: `plane-${name}` }, on: { change: () => go({ plane: name }) } }), el("span", { text: words })));
  const seen = el("strong", { data: { testid: "seen" } });
  const source = el("span", { class: "hint", data: { testid: "experts-source" } });
  const problem = el("p", { class: "notice", role: "status", hidden: true });
  const readout = el("p", { class: "readout", data: { testid: "cell-readout" } });
  const summary = el("p", { class: "readout soft", data: { testid: "imbalance" } });
  const map = new HeatMap({ onPick: pick });
  const none = el("p", { class: "empty", data: { testid: "experts-empty" } });
  const tables = layerTables((layer) => pick({ layer, expert: 0 }, "pick"));
  const help = el("p", { class: "hint", id: "heat-help", text: "Arrow keys move from cell to cell, with Shift eight at a time. The tables below show the numbers." });
  const picture = el("section", { class: "panel", "aria-labelledby": "heat-title" },
    el("div", { class: "panel-head" }, el("h2", { id: "heat-title", text: "Load of experts" }), seen, source),
    el("div", { class: "panel-body" }, legend(), none, map.root, readout, summary, help));
  const root = el("div", { class: "view" }, el("div", { class: "controls" }, el("label", { class: "choice" }, el("span", { text: "Model" }), model), worker.root, planes), problem, picture, tables.root);
  let shown = null;
  empty("Waiting for the first counts.");
  map.canvas.addEventListener("focus", () => setAttr(readout, "aria-live", "polite"));
  map.canvas.addEventListener("blur", () => setAttr(readout, "aria-live", null));

  function go(changes) {
    setParams(changes);
    show();
  }

  /** Show only a sentence while there are no counts. */
  function empty(words) {
    if (words) shown = null;
    showText(none, words);
    for (const node of [map.root, readout, summary, help, seen, source, tables.root]) node.hidden = Boolean(words);
  }

  function pick(cell, how) {
    if (!shown) return;
    const at = how === "pick" && cell ? map.pick(cell) : (cell ?? map.cell);
    const { number, total, share, times } = map.read(at);
    Object.assign(readout.dataset, { layer: at.layer, expert: at.expert, count: number, total });
    setText(readout, total ? `Layer ${at.layer}, expert ${at.expert}: ${count(number)} of ${count(total)} choices, ${decimals(share * 100, 2)} %, ${ratio(times)} an even share` : `Layer ${at.layer}: no tokens`);
    if (how !== "pick" || !cell) return;
    setParams({ layer: at.layer, expert: at.expert });
    tables.showLayer(at.layer);
  }

  function draw(event) {
    const { params } = route();
    const plane = params.get("plane") === "prompt" ? "prompt" : "generated";
    const { num_layers: layers, num_experts: experts } = event;
    showText(problem, event.problem ?? "");
    const data = event.planes?.[plane];
    empty(data ? "" : event.problem ? "There are no counts." : "Waiting for the first counts.");
    if (!data) return;
    shown = { counts: countsOf(data.counts, layers * experts), layers, experts, plane: data };
    map.show({ ...shown, worst: data.max_over_mean, label: `Load of ${layers} layers by ${experts} experts` });
    setText(seen, seenWords(data));
    const asked = event.worker ? event.worker : `${count(event.workers_answered)} of ${plural(event.workers_asked, "sampled worker")}${event.workers_total > event.workers_asked ? `, ${count(event.workers_total)} in all` : ""}`;
    setText(source, `${asked}, ${duration(event.seconds)}, top ${event.top_k}, at ${clock(event.at)}`);
    const worst = data.max_over_mean.indexOf(Math.max(...data.max_over_mean));
    const unused = data.unused.reduce((sum, each) => sum + each, 0);
    setText(summary, data.seen ? `Worst layer ${worst}: its busiest expert has ${ratio(data.max_over_mean[worst])} the mean. Mean entropy ${decimals(data.entropy.reduce((sum, each) => sum + each, 0) / layers, 3)} of 1. ${count(unused)} of ${count(layers * experts)} experts were never chosen.` : "");
    tables.update(shown, map);
    const cell = { layer: Number(params.get("layer") ?? 0) || 0, expert: Number(params.get("expert") ?? 0) || 0 };
    if (!readout.matches(":empty") && map.canvas.matches(":hover")) return;
    map.pick(cell);
    pick(null, "read");
  }

  function show() {
    const { params } = route();
    // A model whose workers are gone keeps its counts.
    const models = [...new Set([...(now.fleet?.models ?? []), ...(now.experts ? [now.experts] : [])].map((each) => each.model))].sort(compareNames);
    keyed(model, models, (name) => name, (name) => el("option", { value: name, text: name }), () => {});
    const wanted = models.includes(params.get("model")) ? params.get("model") : models[0];
    if (wanted && model.value !== wanted) model.value = wanted;
    const name = params.get("worker") ?? "";
    if (worker.input !== document.activeElement) worker.input.value = name;
    const plane = params.get("plane") === "prompt" ? "prompt" : "generated";
    for (const input of planes.querySelectorAll("input")) input.checked = input.value === plane;
    if (wanted) watchExperts(wanted, name || null);
    const event = now.experts;
    if (event && event.model === wanted && (event.worker ?? "") === name) draw(event);
    else empty("Waiting for the first counts.");
  }

  on("experts", () => !root.closest("[hidden]") && show());
  on("fleet", (fleet) => {
    if (!fleet || root.closest("[hidden]")) return;
    worker.update(fleet.workers.filter((each) => each.model === model.value).map((each) => each.worker));
    if (!now.experts) show();
  });
  return { root, show, hide: () => watchExperts(null) };
}
