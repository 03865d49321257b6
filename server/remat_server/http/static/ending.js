/** Cancels jobs that have not ended, and deletes jobs that have. */

import { request } from "./api.js";
import { confirmed } from "./dialogs.js";
import { announce } from "./dom.js";
import { title } from "./format.js";

const ENDED = new Set(["succeeded", "infeasible", "failed", "cancelled"]);

/** Return true if a job has ended. */
export const isEnded = (job) => ENDED.has(job.status);

/** Return the label of the button that cancels or deletes a job. */
export const endingName = (job) => (isEnded(job) ? "Delete" : "Cancel");

/** Cancel or delete a job after a confirmation; return false if the user declines. Throws `Problem`. */
export async function end(job) {
  const name = title(job);
  const isConfirmed = isEnded(job)
    ? await confirmed("Delete this job?", `${name} and its result are deleted permanently.`, "Delete it")
    : await confirmed("Cancel this job?", `${name}: the solve stops now, and its result so far is lost.`, "Cancel it");
  if (!isConfirmed) return false;
  const response = await request(`/jobs/${job.id}`, { method: "DELETE", ask: true });
  announce(response.status === 204 ? "The job is deleted" : "The job is cancelled");
  return true;
}
