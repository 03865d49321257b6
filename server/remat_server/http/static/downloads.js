/** A job's result as files. They are fetched here, as a plain link could not carry a key. */

import { request } from "./api.js";
import { h, tell } from "./dom.js";
import { title } from "./format.js";

const SOLVED = [
  ["plan", "Plan", "plan.json", "for remat.Plan.load"],
  ["program", "Program", "program.json", "for remat.Program.load and remat.lower"],
  ["json", "Whole answer", "answer.json", "plan, program and costs"],
  ["html", "Page", "html", "figures and pictures, to keep or send"],
  ["chrome", "Chrome trace", "chrome.json", "for Perfetto or chrome://tracing"],
  ["python", "Python", "py", "the rewritten graphs, to read"],
  ["svg", "Memory picture", "memory.svg", "SVG"],
  ["schedule", "Schedule picture", "schedule.svg", "SVG"],
];
const SWEPT = [
  ["json", "Whole answer", "answer.json", "all plans and costs"],
  ["svg", "Frontier picture", "frontier.svg", "SVG"],
];

/** The section with a button for each file. */
export function downloads(job) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const items = (job.kind === "sweep" ? SWEPT : SOLVED).map(([form, name, ending, what]) => {
    const click = () => fetchFile(job, form, ending, problem);
    const button = h("button", { type: "button", "data-form": form, click }, name);
    return h("li", {}, button, h("span", { class: "hint" }, what));
  });
  return h("section", { "aria-labelledby": "files-title" },
    h("h2", { id: "files-title" }, "Downloads"), h("ul", { class: "files" }, items), problem);
}

async function fetchFile(job, form, ending, problem) {
  tell(problem, "");
  try {
    const response = await request(`/jobs/${job.id}/result?format=${form}`, { ask: true });
    const url = URL.createObjectURL(await response.blob());
    h("a", { href: url, download: `${fileName(job)}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    tell(problem, error.message);
  }
}

const fileName = (job) =>
  `${title(job).replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+/, "").slice(0, 60) || "model"}-${job.id.slice(0, 8)}`;
