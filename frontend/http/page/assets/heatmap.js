// Layers by experts as coloured cells on a canvas, with the imbalance of each layer on the right.

import { el, setAttr } from "./dom.js";
import { ratio } from "./format.js";
import { colour, onTheme, shareScale } from "./theme.js";

const AXIS_PX = 20;
const LEFT_PX = 34;
const RIGHT_PX = 112;
/** Limits on the size of a cell in pixels: smaller cells are indistinguishable, larger cells are not needed. */
const [MIN_WIDE, MAX_WIDE, MIN_HIGH, MAX_HIGH] = [3, 28, 8, 20];
const HIGH_PX = 560;
const FONT = '10px system-ui, "Segoe UI", Roboto, sans-serif';
/** The bar of a layer is full at this maximum over mean. */
const FULL_BAR = 8;
/** A layer is highlighted if its maximum over mean is at least the first value, and the median times the second. */
const [STANDS_OUT, ABOVE_MEDIAN] = [3, 1.5];

function prepare(canvas, wide, high) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(high * scale)) {
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(high * scale);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, wide, high);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}

/** Return the distance between labels, in cells, that gives each label at least `pixels`. */
const every = (pixels, size) => [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100].find((step) => step * size >= pixels) ?? 128;

/** The heat map. It calls `onPick(cell, how)` for the cell under the pointer, the keys or a press; null on leaving. */
export class HeatMap {
  constructor({ onPick }) {
    this.onPick = onPick;
    this.cell = { layer: 0, expert: 0 };
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-describedby": "heat-help", data: { testid: "heatmap" } });
    this.left = el("canvas", { "aria-hidden": "true" });
    this.right = el("canvas", { "aria-hidden": "true" });
    this.mark = el("div", { class: "cell-mark", hidden: true });
    this.scroller = el("div", { class: "heat-scroll" }, this.canvas, this.mark);
    this.root = el("div", { class: "heat" }, this.left, this.scroller, this.right);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event, "hover"));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event, "pick"));
    this.canvas.addEventListener("pointerleave", () => this.onPick(null, "hover"));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("focus", () => this.onPick(this.cell, "pick"));
    new ResizeObserver(() => this.#draw()).observe(this.root);
    onTheme(() => this.#draw());
  }

  /** Show counts, layer by layer; `worst` has the maximum over mean of each layer. */
  show({ counts, layers, experts, worst, label }) {
    Object.assign(this, { counts, layers, experts, worst });
    this.totals = Array.from({ length: layers }, (_, layer) => {
      let sum = 0;
      for (let expert = 0; expert < experts; expert += 1) sum += counts[layer * experts + expert];
      return sum;
    });
    setAttr(this.canvas, "aria-label", label);
    this.#draw();
  }

  /** Return a cell's count, its share, and its share divided by an even share. */
  read({ layer, expert }) {
    const number = this.counts[layer * this.experts + expert];
    const total = this.totals[layer];
    return { number, total, share: total ? number / total : null, times: total ? (number * this.experts) / total : null };
  }

  /** Select a cell. */
  pick(cell) {
    this.cell = { layer: Math.min(this.layers - 1, Math.max(0, cell.layer)), expert: Math.min(this.experts - 1, Math.max(0, cell.expert)) };
    this.#placeMark();
    return this.cell;
  }

  #draw() {
    if (!this.counts || !this.root.clientWidth) return;
    const room = this.root.clientWidth - LEFT_PX - (this.#isNarrow() ? 0 : RIGHT_PX);
    this.wide = Math.min(MAX_WIDE, Math.max(MIN_WIDE, Math.floor(room / this.experts)));
    this.high = Math.min(MAX_HIGH, Math.max(MIN_HIGH, Math.floor(HIGH_PX / this.layers)));
    this.scale = shareScale();
    this.#drawCells();
    this.#drawLeft();
    this.#drawRight();
    this.#placeMark();
  }

  #isNarrow() {
    return this.root.clientWidth < 560;
  }

  #drawCells() {
    const { wide, high, experts, layers, counts, totals } = this;
    const context = prepare(this.canvas, experts * wide, layers * high + AXIS_PX);
    const gap = wide >= 5 ? 1 : 0;
    for (let layer = 0; layer < layers; layer += 1) {
      const even = totals[layer] / experts;
      if (!even) continue;
      for (let expert = 0; expert < experts; expert += 1) {
        context.fillStyle = this.scale.of(counts[layer * experts + expert] / even);
        context.fillRect(expert * wide, AXIS_PX + layer * high, wide - gap, high - 1);
      }
    }
    context.fillStyle = colour("soft");
    const step = every(34, wide);
    for (let expert = 0; expert < experts; expert += step) context.fillText(String(expert), expert * wide, AXIS_PX / 2);
  }

  #drawLeft() {
    const context = prepare(this.left, LEFT_PX, this.layers * this.high + AXIS_PX);
    context.fillStyle = colour("soft");
    context.textAlign = "right";
    context.fillText("layer", LEFT_PX - 6, AXIS_PX / 2);
    const step = every(14, this.high);
    for (let layer = 0; layer < this.layers; layer += step) context.fillText(String(layer), LEFT_PX - 6, AXIS_PX + (layer + 0.5) * this.high);
  }

  #drawRight() {
    this.right.hidden = this.#isNarrow();
    if (this.right.hidden) return;
    const context = prepare(this.right, RIGHT_PX, this.layers * this.high + AXIS_PX);
    const [soft, text, fill, hot] = ["soft", "text", "fill", "hot"].map(colour);
    context.fillStyle = soft;
    context.fillText("max / mean", 8, AXIS_PX / 2);
    const bar = RIGHT_PX - 50;
    const median = [...this.worst].sort((a, b) => a - b)[Math.floor(this.layers / 2)];
    this.worst.forEach((value, layer) => {
      const y = AXIS_PX + layer * this.high;
      context.fillStyle = value >= Math.max(STANDS_OUT, ABOVE_MEDIAN * median) ? hot : fill;
      context.fillRect(8, y + 1, Math.max(1, bar * Math.min(1, value / FULL_BAR)), this.high - 3);
      if (this.high >= 11 || layer % 2 === 0) {
        context.fillStyle = text;
        context.fillText(this.totals[layer] ? ratio(value) : "", bar + 12, y + this.high / 2);
      }
    });
  }

  #placeMark() {
    if (!this.counts || !this.wide) return;
    const { layer, expert } = this.cell;
    this.mark.hidden = false;
    Object.assign(this.mark.style, { left: `${Math.max(0, expert * this.wide - 2)}px`, top: `${AXIS_PX + layer * this.high - 2}px`, width: `${this.wide + 3}px`, height: `${this.high + 3}px` });
  }

  #point(event, how) {
    if (!this.counts) return;
    const { left, top } = this.canvas.getBoundingClientRect();
    const [expert, layer] = [Math.floor((event.clientX - left) / this.wide), Math.floor((event.clientY - top - AXIS_PX) / this.high)];
    if (layer < 0 || layer >= this.layers || expert < 0 || expert >= this.experts) return;
    this.onPick({ layer, expert }, how);
  }

  #key(event) {
    const step = event.shiftKey ? 8 : 1;
    const { layer, expert } = this.cell;
    const to = {
      ArrowRight: { layer, expert: expert + step },
      ArrowLeft: { layer, expert: expert - step },
      ArrowDown: { layer: layer + step, expert },
      ArrowUp: { layer: layer - step, expert },
      Home: { layer, expert: 0 },
      End: { layer, expert: this.experts - 1 },
      PageUp: { layer: 0, expert },
      PageDown: { layer: this.layers - 1, expert },
    }[event.key];
    if (!to || !this.counts) return;
    event.preventDefault();
    const cell = this.pick(to);
    const x = cell.expert * this.wide;
    if (x < this.scroller.scrollLeft || x + this.wide > this.scroller.scrollLeft + this.scroller.clientWidth) this.scroller.scrollLeft = x - this.scroller.clientWidth / 2;
    this.onPick(cell, "pick");
  }
}
