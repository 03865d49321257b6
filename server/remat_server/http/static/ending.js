/** Ending jobs: cancel those that have not ended, forget those that have. */

import { request } from "./api.js";
import { confirmed } from "./dialogs.js";
import { say } from "./dom.js";
import { title } from "./format.js";

const ENDED = new Set(["succeeded", "infeasible", "failed", "cancelled"]);

/** Whether a job stays as it is. */
export const isEnded = (job) => ENDED.has(job.status);

/** What ending a job is called. */
export const endingName = (job) => (isEnded(job) ? "Forget" : "Cancel");

/** Ask, then cancel or forget. True where it is done. Raises `Problem`. */
export async function end(job) {
  const name = title(job);
  const goOn = isEnded(job)
    ? await confirmed("Forget this job?", `${name} and its result go from your list for good.`, "Forget it")
    : await confirmed("Cancel this job?", `${name}: the solve ends now, and what it found is lost.`, "Cancel it");
  if (!goOn) return false;
  const response = await request(`/jobs/${job.id}`, { method: "DELETE", ask: true });
  say(response.status === 204 ? "The job is forgotten" : "The job is cancelled");
  return true;
}
