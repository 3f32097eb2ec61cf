// The numbers of the heat map as tables: a line for each layer, and one for each expert of the selected layer.

import { el, keyed, setAttr, setText } from "./dom.js";
import { count, decimals, ratio } from "./format.js";

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
export function layerTables(onLayer) {
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
