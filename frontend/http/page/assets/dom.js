// Creates and changes elements and dialogs. All text is inserted as text, so that received data is never parsed as HTML.

/** Create an element. `props`: `class`, `text`, `data` (data-*), `on` (listeners); all others are attributes. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set a text. The page changes only if the text is different. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Show a text. Without a text, hide the node. */
export function showText(node, text) {
  setText(node, text);
  node.hidden = !text;
}

/** Set an attribute; null removes it. */
export function setAttr(node, name, value) {
  if (value === null || value === undefined) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

const kept = new WeakMap();

/**
 * Show items as children. Items that remain keep their element with its focus and its open details.
 * `make(item)` returns an element that `update(element, item)` fills, or `{root, update(item)}`.
 */
export function keyed(parent, items, keyOf, make, update) {
  const old = kept.get(parent) ?? new Map();
  const now = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const made = old.get(key) ?? make(item);
    const node = made.root ?? made;
    old.delete(key);
    now.set(key, made);
    if (made.update) made.update(item);
    else update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const made of old.values()) (made.root ?? made).remove();
  kept.set(parent, now);
}

/** Create a sign with words. `fillMark` fills it. */
export const mark = (tag = "span", words = "span") => el(tag, { class: "state" }, el("span", { class: "glyph", "aria-hidden": "true" }), el(words));

/** Show a sign in the colour of a kind, and words. */
export function fillMark(node, kind, sign, words) {
  setAttr(node, "data-kind", kind);
  setText(node.firstElementChild, sign);
  setText(node.lastElementChild, words);
}

/** Add a bar for a share from 0 to 1 with a text on it. Returns the function that fills it. */
export function meter(parent) {
  const fill = el("span", { class: "fill" });
  const text = el("span", { class: "num" });
  parent.append(el("span", { class: "meter", "aria-hidden": "true" }, fill), text);
  return (share, words) => {
    // A changed scale needs no new layout of the page.
    const scale = `scaleX(${Math.round(1000 * Math.min(1, Math.max(0, share ?? 0))) / 1000})`;
    if (fill.style.transform !== scale) fill.style.transform = scale;
    setText(text, words);
  };
}

/** Mark each table that has more to the right or below. */
export function markScrolling() {
  for (const node of document.querySelectorAll(".scroller, .scroll-x, .heat-scroll, .tabs")) {
    node.classList.toggle("more-right", node.scrollLeft + node.clientWidth < node.scrollWidth - 1);
    node.classList.toggle("more-below", node.scrollTop + node.clientHeight < node.scrollHeight - 1);
  }
}

/** Show a time of this machine's clock, with UTC in its title. */
export function timeOf(node, unix, words) {
  const iso = new Date(unix * 1000).toISOString();
  setText(node, words);
  setAttr(node, "title", `${iso.slice(0, 19).replace("T", " ")} UTC`);
  setAttr(node, "datetime", iso);
}

/**
 * Show a dialog and return it. `fill(body, close)` adds its content.
 * Closing removes the dialog and then calls `onClose()`.
 */
export function openDialog(title, testid, fill, onClose = () => {}) {
  const heading = el("h2", { id: `${testid}-title`, text: title });
  const body = el("div", { class: "dialog-body" });
  const dialog = el("dialog", { "aria-labelledby": heading.id, data: { testid } }, heading, body);
  const close = () => dialog.close();
  fill(body, close);
  dialog.addEventListener("close", () => {
    dialog.remove();
    onClose();
  });
  document.getElementById("dialogs").append(dialog);
  dialog.showModal();
  return dialog;
}
