/** The table of one's own jobs, kept up to date while it can be seen. */

import { json, now } from "./api.js";
import { byId, h, say, setText, tell } from "./dom.js";
import { end, endingName, isEnded } from "./ending.js";
import { age, bytes, moment, overhead, percent, plural, title } from "./format.js";

const PAGE = 20;
const BUSY_MS = 1500;
const IDLE_MS = 10000;

const rows = new Map(); // id: the row's cells
let cursors = [null]; // of the pages up to this one
let next = null;
let timer = 0;
let isShown = false;
let asked = 0;
const states = new Map();

/** Connect the table's buttons, once. */
export function connectQueue() {
  byId("older").addEventListener("click", () => turn([...cursors, next]));
  byId("newer").addEventListener("click", () => turn(cursors.slice(0, -1)));
  document.addEventListener("visibilitychange", () => isShown && refresh());
  addEventListener("remat-key", () => isShown && refresh());
}

/** Begin or end to keep the table up to date. */
export function showQueue(shown) {
  isShown = shown;
  clearTimeout(timer);
  if (shown) refresh();
}

async function turn(to) {
  cursors = to;
  await refresh();
  const first = byId("queue").querySelector("tbody a");
  if (first) first.focus();
}

async function refresh() {
  clearTimeout(timer);
  asked += 1;
  const mine = asked;
  const cursor = cursors.at(-1);
  let isBusy = false;
  try {
    const page = await json(`/jobs?limit=${PAGE}${cursor === null ? "" : `&cursor=${cursor}`}`);
    if (mine !== asked) return;
    tell(byId("queue-problem"), "");
    isBusy = page.jobs.some((job) => !isEnded(job));
    next = page.next;
    fill(page.jobs);
  } catch (error) {
    if (mine !== asked) return;
    tell(byId("queue-problem"), error.message);
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
  jobs.forEach((job, place) => {
    const row = rows.get(job.id) ?? newRow(job);
    update(row, job);
    if (body.rows[place] !== row.element) body.insertBefore(row.element, body.rows[place] ?? null);
  });
  byId("queue").hidden = !jobs.length;
  byId("queue-empty").hidden = jobs.length > 0 || cursors.length > 1;
  byId("pages").hidden = cursors.length === 1 && next === null;
  byId("newer").disabled = cursors.length === 1;
  byId("older").disabled = next === null;
  setText(byId("page-number"), `Page ${cursors.length}`);
}

function newRow(job) {
  const cells = {
    asked: h("td"),
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
  setText(cells.asked, question(job));
  setText(cells.status, status(job));
  cells.status.className = `status ${job.status}`;
  setText(cells.age, age(now() - job.created_at));
  cells.age.title = moment(job.created_at);
  setText(cells.overhead, soFar(job) || range(job.summary.map((plan) => plan.overhead), overhead));
  setText(cells.peak, range(job.summary.map((plan) => plan.peak_bytes), bytes));
  setText(button, endingName(job));
  button.setAttribute("aria-label", `${endingName(job)} ${title(job)}, ${job.status}`);
  const before = states.get(job.id);
  if (before && before !== job.status) say(`${title(job)}: ${status(job)}`);
  states.set(job.id, job.status);
}

/** Of a running solve, the extra time of the best schedule that it knows. */
function soFar(job) {
  const { incumbent, phase } = job.progress ?? {};
  const isKnown = job.status === "running" && job.kind === "solve" && phase === "cost";
  return isKnown && typeof incumbent === "number" ? `${percent(incumbent)} so far` : "";
}

function question(job) {
  if (job.kind === "sweep") {
    return job.summary.length ? `sweep, ${plural(job.summary.length, "budget")}` : "sweep";
  }
  return job.summary.length ? `solve in ${bytes(job.summary[0].budget_bytes)}` : "solve";
}

/** The state in words, with where a queued job stands. */
export function status(job) {
  if (job.status === "queued" && job.position !== null) {
    return job.position ? `queued, ${job.position} before it` : "queued, next";
  }
  if (job.status === "infeasible" && job.problem?.min_feasible_bytes) {
    return `infeasible, needs ${bytes(job.problem.min_feasible_bytes)}`;
  }
  return job.status;
}

function range(numbers, written) {
  if (!numbers.length) return "";
  const low = written(Math.min(...numbers));
  const high = written(Math.max(...numbers));
  return low === high ? low : `${low} to ${high}`;
}

async function finish(row) {
  try {
    if (await end(row.job)) await refresh();
  } catch (error) {
    tell(byId("queue-problem"), error.message);
  }
  if (!row.element.isConnected) byId("queue-title").focus();
}
