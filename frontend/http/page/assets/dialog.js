// Dialogs of the browser, which keep the focus inside, close with Escape and then restore the focus.

import { el } from "./dom.js";

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
