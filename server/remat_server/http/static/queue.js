/** The table of the user's jobs, which is refreshed while it is visible. */

import { json, now } from "./api.js";
import { byId, h, announce, setText, showMessage } from "./dom.js";
import { end, endingName, isEnded } from "./ending.js";
import { age, bytes, moment, overhead, percent, plural, title } from "./format.js";

const PAGE = 20;
const BUSY_MS = 1500;
const IDLE_MS = 10000;

const rows = new Map(); // the row of each job id
let cursors = [null]; // cursors of the pages up to this one
let nextCursor = null;
let timer = 0;
let isShown = false;
let latestRequest = 0;
const states = new Map(); // the last status of each job id

/** Connect the table's buttons. Call it once. */
export function connectQueue() {
  byId("older").addEventListener("click", () => turn([...cursors, nextCursor]));
  byId("newer").addEventListener("click", () => turn(cursors.slice(0, -1)));
  document.addEventListener("visibilitychange", () => isShown && refresh());
  addEventListener("remat-key", () => isShown && refresh());
}

/** Start or stop to refresh the table. */
export function showQueue(shown) {
  isShown = shown;
  clearTimeout(timer);
  if (shown) refresh();
}

async function turn(newCursors) {
  cursors = newCursors;
  await refresh();
  const first = byId("queue").querySelector("tbody a");
  if (first) first.focus();
}

async function refresh() {
  clearTimeout(timer);
  latestRequest += 1;
  const thisRequest = latestRequest;
  const cursor = cursors.at(-1);
  let isBusy = false;
  try {
    const page = await json(`/jobs?limit=${PAGE}${cursor === null ? "" : `&cursor=${cursor}`}`);
    if (thisRequest !== latestRequest) return;
    showMessage(byId("queue-problem"), "");
    isBusy = page.jobs.some((job) => !isEnded(job));
    nextCursor = page.next;
    fill(page.jobs);
  } catch (error) {
    if (thisRequest !== latestRequest) return;
    showMessage(byId("queue-problem"), error.message);
  }
  if (isShown && !document.hidden) timer = setTimeout(refresh, isBusy ? BUSY_MS : IDLE_MS);
}

function fill(jobs) {
  const body = byId("queue").tBodies[0];
  const ids = new Set(jobs.map((job) => job.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.element.remove();
    rows.delete(id);
  }
  jobs.forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    update(row, job);
    if (body.rows[index] !== row.element) body.insertBefore(row.element, body.rows[index] ?? null);
  });
  byId("queue").hidden = !jobs.length;
  byId("queue-empty").hidden = jobs.length > 0 || cursors.length > 1;
  byId("pages").hidden = cursors.length === 1 && nextCursor === null;
  byId("newer").disabled = cursors.length === 1;
  byId("older").disabled = nextCursor === null;
  setText(byId("page-number"), `Page ${cursors.length}`);
}

function newRow(job) {
  const cells = {
    request: h("td"),
    status: h("td"),
    age: h("td", { class: "number" }),
    overhead: h("td", { class: "number" }),
    peak: h("td", { class: "number" }),
  };
  const button = h("button", { type: "button", class: "quiet", click: () => finish(row) });
  const link = h("a", { href: `#/jobs/${job.id}` }, title(job));
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, link, h("span", { class: "id" }, job.id.slice(0, 8))),
    Object.values(cells),
    h("td", {}, button),
  );
  const row = { element, cells, button, job };
  rows.set(job.id, row);
  return row;
}

function update(row, job) {
  row.job = job;
  const { cells, button } = row;
  setText(cells.request, describeRequest(job));
  setText(cells.status, status(job));
  cells.status.className = `status ${job.status}`;
  setText(cells.age, age(now() - job.created_at));
  cells.age.title = moment(job.created_at);
  setText(cells.overhead, soFar(job) || range(job.summary.map((plan) => plan.overhead), overhead));
  setText(cells.peak, range(job.summary.map((plan) => plan.peak_bytes), bytes));
  setText(button, endingName(job));
  button.setAttribute("aria-label", `${endingName(job)} ${title(job)}, ${job.status}`);
  const before = states.get(job.id);
  if (before && before !== job.status) announce(`${title(job)}: ${status(job)}`);
  states.set(job.id, job.status);
}

/** Return the extra time of a running solve's best schedule so far; "" if there is none. */
function soFar(job) {
  const { incumbent, phase } = job.progress ?? {};
  const hasOverhead = job.status === "running" && job.kind === "solve" && phase === "cost";
  return hasOverhead && typeof incumbent === "number" ? `${percent(incumbent)} so far` : "";
}

function describeRequest(job) {
  if (job.kind === "fit" || job.kind === "why") return job.kind;
  if (job.kind === "sweep") {
    return job.summary.length ? `sweep, ${plural(job.summary.length, "budget")}` : "sweep";
  }
  return job.summary.length ? `solve in ${bytes(job.summary[0].budget_bytes)}` : "solve";
}

/** Describe a job's state, with the position of a queued job. */
export function status(job) {
  if (job.status === "queued" && job.position !== null) {
    return job.position ? `queued, ${job.position} before it` : "queued, next";
  }
  if (job.status === "infeasible" && job.problem?.min_feasible_bytes) {
    return `infeasible, needs ${bytes(job.problem.min_feasible_bytes)}`;
  }
  return job.status;
}

function range(numbers, format) {
  if (!numbers.length) return "";
  const low = format(Math.min(...numbers));
  const high = format(Math.max(...numbers));
  return low === high ? low : `${low} to ${high}`;
}

async function finish(row) {
  try {
    if (await end(row.job)) await refresh();
  } catch (error) {
    showMessage(byId("queue-problem"), error.message);
  }
  if (!row.element.isConnected) byId("queue-title").focus();
}
