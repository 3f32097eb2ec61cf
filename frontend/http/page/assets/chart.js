// A chart over time, drawn by uPlot. A gap means that the service has no data for that time.

import { el, keyed, setAttr, setText } from "./dom.js";
import { NONE, clock } from "./format.js";
import { colour, onTheme } from "./theme.js";

const HEIGHT_PX = 190;
/** Limit on lines, so that their colours are distinguishable. Further lines are counted, but not shown. */
export const MAX_LINES = 6;
/** Steps between the labels of counts, which are whole numbers. */
const WHOLE_STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();
const FONT = '11px system-ui, "Segoe UI", Roboto, sans-serif';
const hour = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

const isAlone = (list, index) => list[index] !== null && (list[index - 1] ?? null) === null && (list[index + 1] ?? null) === null;

/** One chart with its title and a legend. The legend shows the values under the pointer, or the last values. */
export class TimeChart {
  constructor({ title, hint, testid, format, isWhole = false, sync = "time", seconds = 3600 }) {
    Object.assign(this, { title, format, isWhole, sync, seconds, data: [[]], names: [] });
    this.legend = el("ul", { class: "legend" });
    this.at = el("time", { class: "hint" });
    this.plot = el("div", { class: "plot", role: "img", "aria-label": title });
    this.root = el("section", { class: "panel chart", data: { testid } }, el("div", { class: "chart-head" }, el("h3", { text: title, title: hint }), this.at), this.legend, this.plot);
    this.marks = [];
    new ResizeObserver(() => this.#resize()).observe(this.plot);
    onTheme(() => this.#rebuild());
  }

  /** Show lines: `lists` are the values at `times`, null without a value; `marks` are `{at, text}`. */
  setData(times, lists, names, marks = []) {
    const same = names.join("\n") === this.names.join("\n");
    this.data = [times, ...lists.slice(0, MAX_LINES)];
    this.names = names.slice(0, MAX_LINES);
    this.marks = marks;
    if (!this.chart || !same) this.#rebuild();
    else this.chart.setData(this.data);
    this.#say();
  }

  #rebuild() {
    this.chart?.destroy();
    this.chart = undefined;
    if (!this.plot.clientWidth) return;
    const [soft, line] = [colour("soft"), colour("line")];
    const axis = { stroke: soft, font: FONT, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
    this.chart = new globalThis.uPlot(
      {
        width: this.plot.clientWidth,
        height: HEIGHT_PX,
        padding: [10, 12, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: this.sync }, y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: { x: { time: true, range: () => this.#span() }, y: { range: (_chart, _low, high) => [0, high > 0 ? high * 1.12 : this.isWhole ? 4 : 1] } },
        axes: [
          { ...axis, values: (_chart, splits) => splits.map((at) => hour.format(at * 1000)), space: 60, size: 30 },
          { ...axis, size: 66, space: 34, ...(this.isWhole ? { incrs: WHOLE_STEPS } : {}), values: (_chart, splits) => splits.map((value) => this.format(value)) },
        ],
        series: [{}, ...this.names.map((name, index) => this.#line(name, index))],
        hooks: { setCursor: [() => this.#say()], draw: [(chart) => this.#drawMarks(chart)] },
      },
      this.data,
      this.plot,
    );
  }

  #line(label, index) {
    const stroke = colour(`series-${index + 1}`);
    // A point between two gaps has no line, so it is drawn as a dot.
    const filter = (_chart, at) => this.data[at].flatMap((_value, place) => (isAlone(this.data[at], place) ? [place] : []));
    return { label, stroke, width: 1.5, spanGaps: false, points: { show: true, filter, size: 4, fill: stroke, width: 0 } };
  }

  #span() {
    const end = this.data[0].at(-1) ?? Date.now() / 1000;
    return [end - this.seconds, end];
  }

  #drawMarks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("soft");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.setLineDash([3, 3]);
    let free = bbox.left;
    for (const { at, text } of this.marks) {
      const x = Math.round(chart.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      // A text that would cover the one before it is left out; the view of the fleet lists all.
      if (x < free) continue;
      ctx.fillText(text, x + 4, bbox.top + 11 * devicePixelRatio);
      free = x + 12 + ctx.measureText(text).width;
    }
    ctx.restore();
  }

  #resize() {
    if (!this.plot.clientWidth) return;
    if (!this.chart) this.#rebuild();
    else if (this.chart.width !== this.plot.clientWidth) this.chart.setSize({ width: this.plot.clientWidth, height: HEIGHT_PX });
  }

  #say() {
    const [times, ...lists] = this.data;
    const under = this.chart?.cursor.idx;
    const index = under ?? times.length - 1;
    setText(this.at, times.length ? clock(times[index] ?? times.at(-1)) : "");
    const lines = this.names.map((name, place) => ({ name, place, value: lists[place]?.[index] }));
    keyed(this.legend, lines, ({ name }) => name, () => el("li", {}, el("span", { class: "swatch", "aria-hidden": "true" }), el("span", { class: "legend-name" }), el("strong")), (item, { name, place, value }) => {
      setAttr(item, "data-series", place + 1);
      setText(item.children[1], name);
      setText(item.children[2], value === null || value === undefined ? NONE : this.format(value));
    });
    if (under === null || under === undefined) setAttr(this.plot, "aria-label", this.#summary());
  }

  #summary() {
    const parts = this.names.map((name, place) => {
      const found = this.data[place + 1].filter((value) => value !== null);
      if (!found.length) return `${name}: no data`;
      return `${name}: now ${this.format(this.data[place + 1].at(-1) ?? NaN)}, between ${this.format(Math.min(...found))} and ${this.format(Math.max(...found))}`;
    });
    return `${this.title}, over time. ${parts.join(". ")}`;
  }
}
