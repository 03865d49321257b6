/** The two dialogs: for the API key, and to confirm what cannot be undone. */

import { byId } from "./dom.js";

/** Ask for a key. Resolves to the text, or to null where there will be none. */
export function askForKey(why, current) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-why").textContent = why;
  byId("key-forget").hidden = !current;
  field.value = "";
  return opened(dialog, field, (close) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) close(field.value.trim());
      else field.focus();
    };
    byId("key-cancel").onclick = () => close(null);
    byId("key-forget").onclick = () => close("");
  });
}

/** Whether the user goes on. */
export function confirmed(title, text, yes) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  return opened(byId("confirm-dialog"), byId("confirm-no"), (close) => {
    byId("confirm-yes").onclick = () => close(true);
    byId("confirm-no").onclick = () => close(null);
  });
}

/** Show a dialog; Escape closes it with null. The focus returns to where it was. */
function opened(dialog, focused, connect) {
  return new Promise((resolve) => {
    let answer = null;
    connect((given) => {
      answer = given;
      dialog.close();
    });
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    focused.focus();
  });
}
