/** Entry point: shows the view that the address names. #/ is the form and the queue, and #/jobs/ID
 * is a job. */

import { changeKey } from "./api.js";
import { byId, announce } from "./dom.js";
import { title } from "./format.js";
import { showJob } from "./job.js";
import { connectQueue, showQueue } from "./queue.js";
import { connectForm, proposeBudget } from "./submit.js";

let viewController = new AbortController(); // aborts the current view's requests
let proposedBytes = null;

function show() {
  viewController.abort();
  viewController = new AbortController();
  const match = /^#\/jobs\/([A-Za-z0-9_-]{1,64})$/.exec(location.hash);
  byId("home").hidden = match !== null;
  byId("job").hidden = match === null;
  byId("job").replaceChildren();
  showQueue(match === null);
  scrollTo(0, 0);
  if (match) {
    showJob(match[1], retry, viewController.signal);
    return;
  }
  document.title = "remat";
  if (proposedBytes !== null) proposeBudget(proposedBytes);
  proposedBytes = null;
}

/** Go to the form, with a proposed budget. */
function retry(sizeBytes) {
  proposedBytes = sizeBytes;
  location.hash = "#/";
}

connectForm((job) => {
  announce(`${title(job)} is ${job.status}`);
  location.hash = `#/jobs/${job.id}`;
});
connectQueue();
byId("key-button").addEventListener("click", changeKey);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash names the view
  byId("main").focus();
});
addEventListener("hashchange", show);
show();
