// Two weight versions side by side, layer by layer. This shows a router that collapses after an update.

import { el, keyed, meter, setAttr, setText } from "./dom.js";
import { count, decimals, duration, percent, ratio, version } from "./format.js";
import { route, setParams } from "./router.js";

/** The bar is full at this maximum over mean. */
const FULL = 8;
/** A layer is marked if its maximum over mean has grown by at least this factor. */
const GROWN = 1.5;

const sum = (list) => list.reduce((all, each) => all + each, 0);
const bars = new WeakMap();

function makeRow() {
  const cells = ["numeric layer-name", "pair", "pair", "numeric", "numeric", "numeric", "numeric", "numeric"].map((name) => el("td", { class: name }));
  const row = el("tr", {}, ...cells);
  bars.set(row, [meter(cells[1]), meter(cells[2])]);
  return row;
}

function fillRow(row, { layer, old, fresh }) {
  const grown = fresh.max_over_mean[layer] / old.max_over_mean[layer];
  bars.get(row)[0](old.max_over_mean[layer] / FULL, ratio(old.max_over_mean[layer]));
  bars.get(row)[1](fresh.max_over_mean[layer] / FULL, ratio(fresh.max_over_mean[layer]));
  const [name, , , change, ...rest] = row.children;
  setText(name, String(layer));
  setText(change, `${grown >= GROWN ? "▲ " : ""}${Number.isFinite(grown) ? `${grown >= 1 ? "+" : "−"}${Math.round(Math.abs(grown - 1) * 100)} %` : "–"}`);
  setAttr(row, "data-kind", grown >= GROWN ? "bad" : null);
  [decimals(old.entropy[layer], 3), decimals(fresh.entropy[layer], 3), count(old.unused[layer]), count(fresh.unused[layer])].forEach((text, index) => setText(rest[index], text));
}

/** Make the panel. */
export function versionsPanel() {
  const names = ["older", "newer"];
  const selects = names.map((name) => el("select", { id: `version-${name}`, data: { testid: `version-${name}` }, on: { change: (event) => choose(name, event.target.value) } }));
  const order = el("input", { type: "checkbox", id: "by-change", on: { change: () => draw() } });
  const words = el("p", { class: "readout", data: { testid: "version-summary" } });
  const heads = [el("tr", {}, el("th", { scope: "col", rowspan: 2, class: "numeric layer-name", text: "Layer" }), el("th", { scope: "colgroup", colspan: 3, text: "Maximum over mean" }), el("th", { scope: "colgroup", colspan: 2, class: "numeric", text: "Entropy" }), el("th", { scope: "colgroup", colspan: 2, class: "numeric", text: "Never chosen" })), el("tr")];
  const body = el("tbody");
  const frame = el("div", { class: "scroller short", tabindex: 0, role: "region", "aria-label": "Versions by layer" }, el("table", { class: "plain tight", "aria-label": "Versions by layer", data: { testid: "versions" } }, el("thead", {}, ...heads), body));
  const none = el("p", { class: "empty" });
  const root = el("section", { class: "panel", "aria-labelledby": "versions-title" },
    el("div", { class: "panel-head" }, el("h2", { id: "versions-title", text: "By version of the weights" }), el("label", { class: "choice" }, el("span", { text: "Older" }), selects[0]), el("label", { class: "choice" }, el("span", { text: "Newer" }), selects[1]), el("label", { class: "check" }, order, el("span", { text: "largest change first" }))),
    none, el("div", { class: "panel-body" }, words), frame);
  let known = null;

  function choose(name, value) {
    setParams({ [name]: value });
    draw();
  }

  function chosen(plane) {
    const { params } = route();
    const list = known.versions.filter((each) => each[plane]?.seen);
    const at = (name, otherwise) => list.find((each) => String(each.weight_version) === params.get(name)) ?? list[otherwise] ?? null;
    return { list, fresh: at("newer", 0), old: at("older", 1) };
  }

  function draw() {
    if (!known) return;
    const { list, fresh, old } = chosen(known.plane);
    const both = Boolean(fresh && old);
    none.hidden = both;
    frame.hidden = words.hidden = !both;
    setText(none, list.length ? `Only ${version(list[0].weight_version)} has counts. A comparison needs a second version.` : "No version has counts.");
    [[selects[0], old], [selects[1], fresh]].forEach(([select, is]) => {
      keyed(select, list, (each) => each.weight_version, (each) => el("option", { value: each.weight_version }), (option, each) => setText(option, `${version(each.weight_version)}${each.seconds === null ? "" : `, ${duration(each.seconds)}`}`));
      if (is) select.value = String(is.weight_version);
    });
    if (both) fill(old, fresh);
  }

  function fill(older, newer) {
    const [old, fresh] = [older[known.plane], newer[known.plane]];
    const [a, b] = [version(older.weight_version), version(newer.weight_version)];
    keyed(heads[1], [[a, "pair"], [b, "pair"], ["change", "numeric"], [a, "numeric"], [b, "numeric"], [a, "numeric"], [b, "numeric"]].map((each, index) => [...each, index]), (each) => each[2], ([, name]) => el("th", { scope: "col", class: name }), (head, [text]) => setText(head, text));
    const rows = fresh.max_over_mean.map((_value, layer) => ({ layer, old, fresh, by: fresh.max_over_mean[layer] / (old.max_over_mean[layer] || 1) }));
    if (order.checked) rows.sort((x, y) => y.by - x.by);
    const most = rows.reduce((best, row) => (row.by > best.by ? row : best), rows[0]);
    const grown = rows.filter(({ by }) => by >= GROWN).length;
    setText(words, `From ${a} to ${b}: ${grown ? `${count(grown)} layers have a maximum over mean that has grown by half or more` : "no layer has a maximum over mean that has grown by half"}; most in layer ${most.layer}, ${ratio(old.max_over_mean[most.layer])} to ${ratio(fresh.max_over_mean[most.layer])}. Never chosen: ${count(sum(old.unused))} to ${count(sum(fresh.unused))}. Seen: ${percent(old.seen / old.computed)} of ${count(old.computed)} and ${percent(fresh.seen / fresh.computed)} of ${count(fresh.computed)} tokens.`);
    keyed(body, rows, ({ layer }) => layer, makeRow, fillRow);
  }

  return {
    root,
    update(event, plane) {
      known = { versions: event.versions ?? [], plane };
      draw();
    },
  };
}
