/** The result of a job: key numbers, pictures, the most expensive recomputations, and downloads. */

import { json, request } from "./api.js";
import { h } from "./dom.js";
import { downloads } from "./downloads.js";
import { showFit } from "./fit.js";
import { PLAN_ADVICE, PLAN_STATUS, SCOPE } from "./format.js";
import { showWhy } from "./why.js";
import { bytes, count, gap, overhead, percent, plural, seconds } from "./format.js";

const MAX_ROWS = 25;

/** Show the result of a successful job in `container`. */
export function showResult(job, container, signal) {
  if (job.kind === "fit") {
    showFit(job, container, signal);
    return;
  }
  if (job.kind === "why") {
    showWhy(job, container, signal);
    return;
  }
  const isSweep = job.kind === "sweep";
  const details = h("div", {});
  const pictures = isSweep
    ? [picture(job, "svg", "Frontier", signal)]
    : [
        picture(job, "svg", "Memory over the step", signal),
        picture(job, "schedule", "Schedule", signal),
        picture(job, "modules", "Recomputed time by module", signal),
      ];
  container.replaceChildren(
    h("section", {},
      h("h2", { id: "result-title" }, isSweep ? "Plans" : "Plan"),
      isSweep ? plans(job.summary) : figures(job.summary[0]),
    ),
    ...pictures,
    details,
    downloads(job),
  );
  addDetails(job, details, container, signal);
}

const figure = (name, value, ...more) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, value), more.map((line) => h("dd", { class: "more" }, line)));

// The peak as a fraction of the baseline's. Like budgets, it excludes the memory of libraries.
function share(plan) {
  const libraryBytes = plan.library_bytes ?? 0;
  const baselineBytes = plan.baseline_peak_bytes - libraryBytes;
  return baselineBytes > 0 ? (plan.peak_bytes - libraryBytes) / baselineBytes : 1;
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
  const heads = ["Budget", "Peak", "Of baseline", "Overhead", "Proved bound", "Gap"];
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

/** Return a picture that the service draws. It is shown as an image, so it cannot run scripts. */
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

/** Return a picture's outermost element, without its content. */
function rootOf(text) {
  const head = /<svg\b[^>]*>/.exec(text)?.[0] ?? "<svg>";
  return new DOMParser().parseFromString(`${head}</svg>`, "image/svg+xml").documentElement;
}

/** Add the details that need the complete answer: costs, scope of the bound, recomputations. */
async function addDetails(job, container, result, signal) {
  try {
    const answer = await json(`/jobs/${job.id}/result?format=json`, { signal });
    const costs = h("p", { class: "hint" }, `Costs: ${answer.costs}.`);
    if (!answer.plan) {
      container.replaceChildren(costs);
      return;
    }
    result.querySelector("#scope")?.append(SCOPE[answer.plan.bound_scope] ?? "");
    result.querySelector("#over-slots")?.append(gapOverSlots(answer.plan));
    container.replaceChildren(recomputed(answer.plan), costs);
  } catch (error) {
    if (!signal.aborted) container.replaceChildren(h("p", { class: "problem" }, error.message));
  }
}

/** Describe the gap for the available slots, if the bound for all schedules is weaker. */
function gapOverSlots(plan) {
  const bound = plan.stats.slots_bound;
  if (typeof bound !== "number" || plan.lower_bound === null || bound <= plan.lower_bound) return "";
  const overhead = plan.time_s / plan.baseline_time_s - 1;
  return `${gap(Math.max(0, (overhead - bound) / (1 + overhead)))} ${SCOPE.slots}`;
}

function recomputed(plan) {
  const { operations, values } = plan.graph;
  const runCounts = new Map();
  for (const op of plan.runs) runCounts.set(op, (runCounts.get(op) ?? 0) + 1);
  const recomputedOperations = [...runCounts]
    .filter(([, runs]) => runs > 1)
    .map(([op, runs]) => ({
      ...operations[op],
      recomputations: runs - 1,
      extra_s: (runs - 1) * operations[op].cost_s,
      size_bytes: operations[op].outputs.reduce((sum, value) => sum + values[value].size_bytes, 0),
    }))
    .sort((a, b) => b.extra_s - a.extra_s || b.size_bytes - a.size_bytes);
  const total = recomputedOperations.reduce((sum, operation) => sum + operation.recomputations, 0);
  const extra = recomputedOperations.reduce((sum, operation) => sum + operation.extra_s, 0);
  const title = h("h2", { id: "most-title" }, "Most expensive recomputations");
  if (!recomputedOperations.length) {
    return h("section", {}, title, h("p", {}, "Nothing is recomputed: all values fit into the budget."));
  }
  const note = recomputedOperations.length > MAX_ROWS ? ` The table has the ${MAX_ROWS} most expensive ones.` : "";
  const summary = `${count(recomputedOperations.length)} of ${plural(operations.length, "operation")} are ` +
    `recomputed: ${plural(total, "recomputation")}, ${seconds(extra)} in total.${note}`;
  const heads = ["Recomputations", "Time each", "Total time", "Output"];
  const rows = recomputedOperations.slice(0, MAX_ROWS).map((operation) =>
    h("tr", {},
      h("th", { scope: "row" }, operation.name),
      h("td", { class: "module" }, operation.module),
      h("td", { class: "number" }, count(operation.recomputations)),
      h("td", { class: "number" }, seconds(operation.cost_s)),
      h("td", { class: "number" }, seconds(operation.extra_s)),
      h("td", { class: "number" }, bytes(operation.size_bytes)),
    ));
  return h("section", {}, title, h("p", {}, summary),
    scrolled("most-title", h("table", {},
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "Operation"), h("th", { scope: "col" }, "Module"),
        heads.map((name) => h("th", { scope: "col", class: "number" }, name)))),
      h("tbody", {}, rows))));
}
