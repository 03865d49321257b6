/** Downloads of a job's result. Scripts fetch them, because a link cannot send the API key. */

import { request } from "./api.js";
import { h, showMessage } from "./dom.js";
import { title } from "./format.js";

const SOLVE_FILES = [
  ["plan", "Plan", "plan.json", "for remat.Plan.load"],
  ["program", "Program", "program.json", "for remat.Program.load and remat.lower"],
  ["json", "Complete answer", "answer.json", "plan, program and costs"],
  ["html", "Page", "html", "numbers and pictures in one file"],
  ["chrome", "Chrome trace", "chrome.json", "for Perfetto or chrome://tracing"],
  ["python", "Python", "py", "the rewritten graphs as readable code"],
  ["svg", "Memory picture", "memory.svg", "SVG"],
  ["schedule", "Schedule picture", "schedule.svg", "SVG"],
];
const SWEEP_FILES = [
  ["json", "Complete answer", "answer.json", "all plans and costs"],
  ["svg", "Frontier picture", "frontier.svg", "SVG"],
];

const FIT_FILES = [["json", "Complete answer", "answer.json", "memory, options and their code"]];
const WHY_FILES = [
  ["html", "Page", "html", "the report and a picture in one file"],
  ["json", "Complete answer", "answer.json", "findings, lines and parts"],
];
const FILES = { solve: SOLVE_FILES, sweep: SWEEP_FILES, fit: FIT_FILES, why: WHY_FILES };

/** Return the section with a button for each file. */
export function downloads(job) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const items = FILES[job.kind].map(([form, name, ending, description]) => {
    const click = () => fetchFile(job, form, ending, problem);
    const button = h("button", { type: "button", "data-form": form, click }, name);
    return h("li", {}, button, h("span", { class: "hint" }, description));
  });
  return h("section", { "aria-labelledby": "files-title" },
    h("h2", { id: "files-title" }, "Downloads"), h("ul", { class: "files" }, items), problem);
}

async function fetchFile(job, form, ending, problem) {
  showMessage(problem, "");
  try {
    const response = await request(`/jobs/${job.id}/result?format=${form}`, { ask: true });
    const url = URL.createObjectURL(await response.blob());
    h("a", { href: url, download: `${fileName(job)}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    showMessage(problem, error.message);
  }
}

const fileName = (job) =>
  `${title(job).replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+/, "").slice(0, 60) || "model"}-${job.id.slice(0, 8)}`;
