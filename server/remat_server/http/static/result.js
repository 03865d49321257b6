/** The result of a job: figures, pictures, what is recomputed most, and files to take along. */

import { json, request } from "./api.js";
import { h } from "./dom.js";
import { downloads } from "./downloads.js";
import { PLAN_ADVICE, PLAN_STATUS, SCOPE } from "./format.js";
import { bytes, count, gap, overhead, percent, plural, seconds } from "./format.js";

const MOST = 25;

/** Fill `place` with the result of a job that succeeded. */
export function resultOf(job, place, signal) {
  const isSweep = job.kind === "sweep";
  const details = h("div", {});
  const pictures = isSweep
    ? [picture(job, "svg", "Frontier", signal)]
    : [
        picture(job, "svg", "Memory over the step", signal),
        picture(job, "schedule", "Schedule", signal),
        picture(job, "modules", "Recomputed time by module", signal),
      ];
  place.replaceChildren(
    h("section", {},
      h("h2", { id: "result-title" }, isSweep ? "Plans" : "Plan"),
      isSweep ? plans(job.summary) : figures(job.summary[0]),
    ),
    ...pictures,
    details,
    downloads(job),
  );
  detail(job, details, place, signal);
}

const figure = (name, value, ...more) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, value), more.map((line) => h("dd", { class: "more" }, line)));

// As budgets count: without what libraries hold on the device.
function share(plan) {
  const held = plan.library_bytes ?? 0;
  const whole = plan.baseline_peak_bytes - held;
  return whole > 0 ? (plan.peak_bytes - held) / whole : 1;
}

function figures(plan) {
  const saved = 1 - share(plan);
  const ofBudget = plan.budget_bytes ? plan.peak_bytes / plan.budget_bytes : 0;
  const bound =
    plan.lower_bound === null
      ? figure("Proved bound", "none")
      : figure("Proved bound", `at least ${overhead(plan.lower_bound)}`, h("span", { id: "scope" }));
  return h("div", {},
    h("p", { class: "verdict" }, `${PLAN_STATUS[plan.status] ?? plan.status}. ${PLAN_ADVICE[plan.status] ?? ""}`),
    h("dl", { class: "figures" },
      figure("Peak memory", bytes(plan.peak_bytes),
        `${percent(ofBudget, 1)} of the budget of ${bytes(plan.budget_bytes)}`),
      figure("Without recomputation", bytes(plan.baseline_peak_bytes), `${percent(saved, 1)} saved`),
      figure("Overhead", overhead(plan.overhead),
        `${seconds(plan.time_s)} instead of ${seconds(plan.baseline_time_s)}`),
      bound,
      figure("Gap", gap(plan.gap), "of the total time", h("span", { id: "over-slots" })),
    ));
}

function plans(summary) {
  const heads = ["Budget", "Peak", "Of that peak", "Overhead", "Proved bound", "Gap"];
  const rows = summary.map((plan) =>
    h("tr", {},
      [
        bytes(plan.budget_bytes),
        bytes(plan.peak_bytes),
        percent(share(plan), 1),
        overhead(plan.overhead),
        plan.lower_bound === null ? "none" : overhead(plan.lower_bound),
        gap(plan.gap),
      ].map((text) => h("td", { class: "number" }, text)),
      h("td", {}, plan.status === "OPTIMAL" ? "proved within the gap" : "not proved"),
    ));
  const first = summary[0];
  return h("div", {},
    first && h("p", {}, `Without recomputation the peak is ${bytes(first.baseline_peak_bytes)} and the step ` +
      `takes ${seconds(first.baseline_time_s)}.`),
    scrolled("result-title", h("table", {},
      h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col", class: "number" }, name)),
        h("th", { scope: "col" }, "Status"))),
      h("tbody", {}, rows))));
}

const scrolled = (label, ...children) =>
  h("div", { class: "scroll", role: "region", "aria-labelledby": label, tabindex: 0 }, children);

/** A picture that the service draws, shown as an image: nothing in it can run. */
function picture(job, form, name, signal) {
  const id = `picture-${form}`;
  const frame = scrolled(id, h("p", { class: "hint" }, "Drawing …"));
  draw(job, form, name, frame, signal);
  return h("section", { class: "picture" }, h("h2", { id, class: "unseen" }, name), frame);
}

async function draw(job, form, name, frame, signal) {
  try {
    const response = await request(`/jobs/${job.id}/result?format=${form}`, { signal });
    const text = await response.text();
    const root = rootOf(text);
    const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    signal.addEventListener("abort", () => URL.revokeObjectURL(url), { once: true });
    const size = { width: root.getAttribute("width"), height: root.getAttribute("height") };
    frame.replaceChildren(h("img", { src: url, alt: root.getAttribute("aria-label") || name, ...size }));
  } catch (error) {
    if (signal.aborted) return;
    frame.replaceChildren(h("p", { class: "problem" }, `${name}: ${error.message}`));
  }
}

/** A picture's outermost element, without what is in it. */
function rootOf(text) {
  const head = /<svg\b[^>]*>/.exec(text)?.[0] ?? "<svg>";
  return new DOMParser().parseFromString(`${head}</svg>`, "image/svg+xml").documentElement;
}

/** What only the answer itself tells. */
async function detail(job, place, whole, signal) {
  try {
    const answer = await json(`/jobs/${job.id}/result?format=json`, { signal });
    const costs = h("p", { class: "hint" }, `Costs: ${answer.costs}.`);
    if (!answer.plan) {
      place.replaceChildren(costs);
      return;
    }
    whole.querySelector("#scope")?.append(SCOPE[answer.plan.bound_scope] ?? "");
    whole.querySelector("#over-slots")?.append(overSlots(answer.plan));
    place.replaceChildren(recomputed(answer.plan), costs);
  } catch (error) {
    if (!signal.aborted) place.replaceChildren(h("p", { class: "problem" }, error.message));
  }
}

/** The gap to the schedules over the places that were offered, where only a weaker bound is proved for all. */
function overSlots(plan) {
  const bound = plan.stats.slots_bound;
  if (typeof bound !== "number" || plan.lower_bound === null || bound <= plan.lower_bound) return "";
  const overhead = plan.time_s / plan.baseline_time_s - 1;
  return `${gap(Math.max(0, (overhead - bound) / (1 + overhead)))} ${SCOPE.slots}`;
}

function recomputed(plan) {
  const { operations, values } = plan.graph;
  const times = new Map();
  for (const op of plan.runs) times.set(op, (times.get(op) ?? 0) + 1);
  const again = [...times]
    .filter(([, runs]) => runs > 1)
    .map(([op, runs]) => ({
      ...operations[op],
      again: runs - 1,
      extra_s: (runs - 1) * operations[op].cost_s,
      size_bytes: operations[op].outputs.reduce((sum, value) => sum + values[value].size_bytes, 0),
    }))
    .sort((a, b) => b.extra_s - a.extra_s || b.size_bytes - a.size_bytes);
  const runs = again.reduce((sum, operation) => sum + operation.again, 0);
  const extra = again.reduce((sum, operation) => sum + operation.extra_s, 0);
  const title = h("h2", { id: "most-title" }, "Recomputed most");
  if (!again.length) {
    return h("section", {}, title, h("p", {}, "Nothing is recomputed: everything fits."));
  }
  const shown = again.length > MOST ? ` The table has the ${MOST} that take the most time.` : "";
  const words = `${plural(again.length, "operation")} of ${count(operations.length)} run again, ` +
    `${plural(runs, "run")} of ${seconds(extra)} in all.${shown}`;
  const heads = ["Times again", "Time each", "Time in all", "Output"];
  const rows = again.slice(0, MOST).map((operation) =>
    h("tr", {},
      h("th", { scope: "row" }, operation.name),
      h("td", { class: "module" }, operation.module),
      h("td", { class: "number" }, count(operation.again)),
      h("td", { class: "number" }, seconds(operation.cost_s)),
      h("td", { class: "number" }, seconds(operation.extra_s)),
      h("td", { class: "number" }, bytes(operation.size_bytes)),
    ));
  return h("section", {}, title, h("p", {}, words),
    scrolled("most-title", h("table", {},
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "Operation"), h("th", { scope: "col" }, "Module"),
        heads.map((name) => h("th", { scope: "col", class: "number" }, name)))),
      h("tbody", {}, rows))));
}
