// Elements made and changed by script. All text goes in as text: nothing from the wire is ever read as HTML.

/** Make an element. `props`: `class`, `text`, `data` (data-*), `on` (listeners); all others are attributes. */
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

/** Make an element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Write a text; the page is touched only if the text is another one. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Write an attribute; null removes it. */
export function setAttr(node, name, value) {
  if (value === null || value === undefined) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

const kept = new WeakMap();

/**
 * Show items as children: those that stay keep their element, with its focus and what is open in it.
 * `make(item)` returns an element, `update(element, item)` fills it.
 */
export function keyed(parent, items, keyOf, make, update) {
  const old = kept.get(parent) ?? new Map();
  const now = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const node = old.get(key) ?? make(item);
    old.delete(key);
    now.set(key, node);
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of old.values()) node.remove();
  kept.set(parent, now);
}

/** A number that sits in a bar of its share, from 0 to 1. Returns what fills it. */
export function meter(parent) {
  const fill = el("span", { class: "fill" });
  const text = el("span", { class: "num" });
  parent.append(el("span", { class: "meter", "aria-hidden": "true" }, fill), text);
  return (share, words) => {
    // A change of scale is drawn without a new layout of the page.
    const scale = `scaleX(${Math.round(1000 * Math.min(1, Math.max(0, share ?? 0))) / 1000})`;
    if (fill.style.transform !== scale) fill.style.transform = scale;
    setText(text, words);
  };
}

/** A time on this machine's clock, with UTC in its title. */
export function timeOf(node, unix, words) {
  const iso = new Date(unix * 1000).toISOString();
  setText(node, words);
  setAttr(node, "title", `${iso.slice(0, 19).replace("T", " ")} UTC`);
  setAttr(node, "datetime", iso);
}
