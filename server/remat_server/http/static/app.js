/** Where everything begins: which view the address asks for. #/ is the form and the queue, and
 * #/jobs/ID is a job. */

import { changeKey } from "./api.js";
import { byId, say } from "./dom.js";
import { title } from "./format.js";
import { showJob } from "./job.js";
import { connectQueue, showQueue } from "./queue.js";
import { connectForm, propose } from "./submit.js";

let leaving = new AbortController();
let proposed = null;

function show() {
  leaving.abort();
  leaving = new AbortController();
  const found = /^#\/jobs\/([A-Za-z0-9_-]{1,64})$/.exec(location.hash);
  byId("home").hidden = found !== null;
  byId("job").hidden = found === null;
  byId("job").replaceChildren();
  showQueue(found === null);
  scrollTo(0, 0);
  if (found) {
    showJob(found[1], retry, leaving.signal);
    return;
  }
  document.title = "remat";
  if (proposed !== null) propose(proposed);
  proposed = null;
}

/** To the form, with a budget. */
function retry(sizeBytes) {
  proposed = sizeBytes;
  location.hash = "#/";
}

connectForm((job) => {
  say(`${title(job)} is ${job.status}`);
  location.hash = `#/jobs/${job.id}`;
});
connectQueue();
byId("key-button").addEventListener("click", changeKey);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the view's
  byId("main").focus();
});
addEventListener("hashchange", show);
show();
