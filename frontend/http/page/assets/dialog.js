// Dialogs: the browser's own, which keep the focus inside, close with Escape and give the focus back.

import { el } from "./dom.js";

/**
 * Show a dialog and return it. `fill(body, close)` puts in what it says.
 * It is removed when it is closed; `onClose()` hears of that.
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
