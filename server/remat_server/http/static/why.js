/** The explanation of an out-of-memory error: its causes, and the parts of the live memory. */

import { json } from "./api.js";
import { h } from "./dom.js";
import { downloads } from "./downloads.js";
import { bytes, percent } from "./format.js";

/** Show the answer of a job in `container`. */
export async function showWhy(job, container, signal) {
  const answer = h("div", {}, h("p", { class: "hint" }, "Loading …"));
  container.replaceChildren(answer, downloads(job));
  try {
    const { explanation } = await json(`/jobs/${job.id}/result?format=json`, { signal });
    answer.replaceChildren(causes(explanation), parts(explanation));
  } catch (error) {
    if (!signal.aborted) answer.replaceChildren(h("p", { class: "problem" }, error.message));
  }
}

function causes(explanation) {
  const { requested_bytes: requested, live_bytes: live, reserved_bytes: reserved } = explanation;
  const [first, ...others] = explanation.findings;
  const figures = [["Request that failed", requested], ["Allocated", live], ["Reserved", reserved],
    ["Free on the device", explanation.device_free_bytes]]
    .filter(([, size]) => size)
    .map(([name, size]) => h("div", {}, h("dt", {}, name), h("dd", {}, bytes(size))));
  return h("section", {},
    h("h2", {}, requested ? "Why the memory ran out" : "What takes the memory"),
    first && h("p", { class: "verdict" }, `${first.kind}: ${bytes(first.size_bytes)}.`),
    first && cause(first),
    h("dl", { class: "figures" }, figures),
    others.slice(0, 3).map((finding) =>
      h("div", {}, h("h3", {}, `Also ${finding.kind}: ${bytes(finding.size_bytes)}`), cause(finding))),
    explanation.notes.map((note) => h("p", { class: "hint" }, `${note}.`)));
}

function cause(finding) {
  const where = place(finding.place);
  return h("div", {},
    h("p", {}, `${finding.text}.`),
    where && h("p", {}, h("code", {}, where)),
    h("p", {}, `${finding.remedy}.`));
}

/** Return the module, the line, and the line of the script that led there. */
function place({ frame, script, module }) {
  const lines = [frame, script].filter(Boolean).map(([file, line, name]) => `${file}:${line} (${name})`);
  return [module, ...new Set(lines)].filter(Boolean).join(", from ");
}

function parts({ parts: sizes }) {
  const total = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  if (!total) return h("section", {});
  const number = (text) => h("td", { class: "number" }, text);
  const rows = Object.entries(sizes).map(([name, size]) =>
    h("tr", {}, h("th", { scope: "row" }, name), number(bytes(size)), number(percent(size / total, 1))));
  return h("section", {}, h("h2", { id: "live-title" }, "Live memory"),
    h("div", { class: "scroll", role: "region", "aria-labelledby": "live-title", tabindex: 0 },
      h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Part"),
          ["Size", "Share"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
        h("tbody", {}, rows))));
}
