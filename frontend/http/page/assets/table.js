// A table with thousands of rows, of which only the visible ones are elements. Its headers sort it.

import { el, setAttr, setText } from "./dom.js";

/** Height of a row of one line. */
const ROW_PX = 30;
/** Number of rows beyond each edge, so that quick scrolling shows no gap. */
const SPARE = 8;
/** Space right of a text in a cell. */
const PAD_PX = 10;
/** Time between two sorts by a column with changing values. */
const SORT_EVERY_MS = 5000;

/** On a phone, the first column stays visible and is narrower, to leave room for the others. Its texts are wrapped. */
const narrow = matchMedia("(max-width: 640px)");
/** On a phone: characters in a line of a wrapped text, and height of a line. */
const [LINE_CHARS, LINE_PX, WRAP_PAD_PX] = [14, 16, 14];

/** Height of the rows on a phone, whose texts are wrapped and have `more` lines below. */
export const wrappedPx = (texts, more = 0) => WRAP_PAD_PX + LINE_PX * (Math.max(1, ...texts.map((text) => Math.ceil(text.length / LINE_CHARS))) + more);

/**
 * A column is `{id, title, hint, width, narrow, numeric, value(row), cell(td)}`. `value` returns the sort key. `cell`
 * prepares a cell and returns the function that fills it with a row. A column becomes as wide as its widest text.
 * `narrowPx(rows)` returns the height of the rows on a phone.
 */
export class VirtualTable {
  constructor({ columns, keyOf, label, testid, empty, sort, onSort, narrowPx }) {
    Object.assign(this, { keyOf, empty, sort, onSort, narrowPx });
    this.all = columns;
    this.rows = [];
    this.order = [];
    this.sortedAt = 0;
    this.pool = [];
    this.top = el("tr", { "aria-hidden": "true", class: "spacer" }, el("td", {}));
    this.bottom = el("tr", { "aria-hidden": "true", class: "spacer" }, el("td", {}));
    this.body = el("tbody", {}, this.top, this.bottom);
    this.groups = el("colgroup");
    this.head = el("tr", { "aria-rowindex": 1 });
    this.table = el("table", { class: "grid", "aria-label": label, data: { testid } }, this.groups, el("thead", {}, this.head), this.body);
    this.none = el("p", { class: "empty", hidden: true });
    this.scroller = el("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": label, on: { scroll: () => this.#soon() } }, this.table);
    this.root = el("div", { class: "table-frame" }, this.scroller, this.none);
    new ResizeObserver(() => this.#soon()).observe(this.scroller);
    narrow.addEventListener("change", () => {
      this.#setWidths();
      this.setRows(this.rows);
    });
    this.showColumns(() => true);
  }

  /** Show the columns for which `wanted(column)` is true. */
  showColumns(wanted) {
    const columns = this.all.filter(wanted);
    if (this.columns && columns.length === this.columns.length) return;
    this.columns = columns;
    this.#setWidths();
    this.headers = columns.map((column) => this.#header(column));
    this.head.replaceChildren(...this.headers);
    for (const spacer of [this.top, this.bottom]) spacer.firstElementChild.colSpan = columns.length;
    for (const { tr } of this.pool) tr.remove();
    this.pool = [];
    setAttr(this.table, "aria-colcount", columns.length);
    this.#markSort();
    this.#soon();
  }

  #setWidths() {
    this.widths = this.columns.map((column) => (narrow.matches && column.narrow) || column.width);
    this.groups.replaceChildren(...this.columns.map(() => el("col")));
    this.#applyWidths();
  }

  #applyWidths() {
    this.widths.forEach((width, index) => (this.groups.children[index].style.width = `${width}px`));
    this.table.style.minWidth = `${this.widths.reduce((sum, width) => sum + width, 0)}px`;
  }

  /** Widen columns whose texts are cut. Columns never become narrower, so that the table does not move. */
  #widen() {
    let changed = false;
    this.columns.forEach(({ narrow: wraps }, index) => {
      if (narrow.matches && wraps) return;
      const cells = [this.headers[index], ...this.pool.map(({ tr }) => tr.children[index])];
      const missing = Math.max(...cells.map((cell) => cell.scrollWidth - cell.clientWidth));
      if (missing <= 0) return;
      this.widths[index] = Math.max(this.widths[index], this.headers[index].clientWidth) + missing + PAD_PX;
      changed = true;
    });
    if (changed) this.#applyWidths();
  }

  #header(column) {
    const button = el("button", { type: "button", title: column.hint, on: { click: () => this.#sortBy(column) } }, el("span", { text: column.title }), el("span", { class: "arrow", "aria-hidden": "true" }));
    return el("th", { scope: "col", class: column.numeric ? "numeric" : "", data: { column: column.id } }, button);
  }

  #sortBy(column) {
    const same = this.sort.id === column.id;
    // Numbers are sorted in descending order at first.
    this.sortAs({ id: column.id, down: same ? !this.sort.down : Boolean(column.numeric) });
    this.onSort?.(this.sort);
  }

  /** Sort the rows by a column. */
  sortAs(sort) {
    this.sort = sort;
    this.sortedAt = 0;
    this.#markSort();
    this.setRows(this.rows);
  }

  #markSort() {
    this.columns.forEach((column, index) => {
      const is = column.id === this.sort.id;
      setAttr(this.headers[index], "aria-sort", is ? (this.sort.down ? "descending" : "ascending") : null);
      setText(this.headers[index].querySelector(".arrow"), is ? (this.sort.down ? "▾" : "▴") : "");
    });
  }

  /** Show these rows. */
  setRows(rows) {
    const byKey = new Map(rows.map((row) => [this.keyOf(row), row]));
    const known = new Set(this.order);
    const same = known.size === byKey.size && this.order.every((key) => byKey.has(key));
    // Keep the order while the pointer is over the table.
    const held = same && this.sortedAt && (this.scroller.matches(":hover") || performance.now() - this.sortedAt < SORT_EVERY_MS);
    this.rows = rows;
    if (held) this.shown = this.order.map((key) => byKey.get(key));
    else {
      this.shown = this.#sorted(rows);
      this.order = this.shown.map(this.keyOf);
      this.sortedAt = performance.now();
    }
    setAttr(this.table, "aria-rowcount", rows.length + 1);
    this.none.hidden = rows.length > 0;
    if (!rows.length) setText(this.none, this.empty());
    this.#draw();
  }

  #sorted(rows) {
    const column = this.columns.find(({ id }) => id === this.sort.id) ?? this.columns[0];
    const sign = this.sort.down ? -1 : 1;
    const compare = (a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      // Unknown values come last in both orders.
      if (x === y || (x ?? null) === (y ?? null)) return this.columns[0].compare(a, b);
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (column.compare ? column.compare(a, b) : x < y ? -1 : 1) || this.columns[0].compare(a, b);
    };
    return [...rows].sort(compare);
  }

  #soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.#draw();
    });
  }

  #draw() {
    if (!this.shown) return;
    const rowPx = narrow.matches ? this.narrowPx(this.rows) : ROW_PX;
    this.table.style.setProperty("--row", `${rowPx}px`);
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / rowPx) - SPARE);
    const room = Math.ceil((this.scroller.clientHeight || 600) / rowPx) + 2 * SPARE;
    const end = Math.min(this.shown.length, first + room);
    while (this.pool.length < end - first) this.#addRow();
    while (this.pool.length > Math.max(0, end - first)) this.pool.pop().tr.remove();
    for (let index = first; index < end; index += 1) {
      const { tr, fills } = this.pool[index - first];
      const row = this.shown[index];
      setAttr(tr, "aria-rowindex", index + 2);
      // Stripes move with the rows during scrolling.
      tr.classList.toggle("odd", index % 2 === 1);
      tr.dataset.key = this.keyOf(row);
      for (const fill of fills) fill(row);
    }
    this.top.firstElementChild.style.height = `${first * rowPx}px`;
    this.bottom.firstElementChild.style.height = `${Math.max(0, this.shown.length - end) * rowPx}px`;
    if (this.scroller.clientWidth) this.#widen();
  }

  #addRow() {
    const tr = el("tr");
    const fills = this.columns.map((column, index) => {
      const cell = index === 0 ? el("th", { scope: "row" }) : el("td", { class: column.numeric ? "numeric" : "", data: { column: column.id } });
      tr.append(cell);
      return column.cell(cell);
    });
    this.body.insertBefore(tr, this.bottom);
    this.pool.push({ tr, fills });
  }
}

/** A cell with a text, and a longer text in its title. */
export const textCell = (text, title = () => null) => (td) => (row) => {
  setText(td, text(row));
  setAttr(td, "title", title(row));
};
