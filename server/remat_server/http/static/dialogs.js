/** Dialogs for the API key, and to confirm actions that cannot be undone. */

import { byId } from "./dom.js";

/** Ask for a key. Resolves to the text, to "" to delete the key, or to null if the user declines. */
export function askForKey(reason, current) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-why").textContent = reason;
  byId("key-delete").hidden = !current;
  field.value = "";
  return opened(dialog, field, (close) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) close(field.value.trim());
      else field.focus();
    };
    byId("key-cancel").onclick = () => close(null);
    byId("key-delete").onclick = () => close("");
  });
}

/** Ask for confirmation. Resolves to true, or to null if the user declines. */
export function confirmed(title, text, yes) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  return opened(byId("confirm-dialog"), byId("confirm-no"), (close) => {
    byId("confirm-yes").onclick = () => close(true);
    byId("confirm-no").onclick = () => close(null);
  });
}

/** Show a dialog. Resolves to its answer; Escape closes it with null. The browser restores the focus. */
function opened(dialog, focused, connect) {
  return new Promise((resolve) => {
    let answer = null;
    connect((value) => {
      answer = value;
      dialog.close();
    });
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    focused.focus();
  });
}
