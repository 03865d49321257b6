/** The answer to "Will it fit?": the verdict, the parts of the peak, and a table of options. */

import { json } from "./api.js";
import { h } from "./dom.js";
import { downloads } from "./downloads.js";
import { bytes, overhead, percent, seconds } from "./format.js";

/** Show the answer of a job in `container`. */
export async function showFit(job, container, signal) {
  const answer = h("div", {}, h("p", { class: "hint" }, "Loading …"));
  container.replaceChildren(answer, downloads(job));
  try {
    const { fits, fit } = await json(`/jobs/${job.id}/result?format=json`, { signal });
    answer.replaceChildren(verdict(fits, fit), parts(fit.memory), options(fit));
  } catch (error) {
    if (!signal.aborted) answer.replaceChildren(h("p", { class: "problem" }, error.message));
  }
}

function verdict(fits, fit) {
  const { memory } = fit;
  const rest = fit.usable_bytes - memory.reserved_bytes;
  const batch = fit.batch === null ? "" : `batch ${fit.batch}, `;
  return h("section", {},
    h("h2", {}, "Will it fit?"),
    h("p", { class: "verdict" }, fits ? `Yes: ${bytes(rest)} remain.` : `No: ${bytes(-rest)} too much.`),
    h("dl", { class: "figures" },
      figure("Reserved by torch's allocator", bytes(memory.reserved_bytes),
        `${fit.reserved_range_bytes.map(bytes).join(" to ")} with tensors 3% smaller or larger, ` +
          `${bytes(memory.expandable_bytes)} with expandable segments`),
      figure("Usable", bytes(fit.usable_bytes), fit.device),
      figure("Peak", bytes(memory.peak_bytes),
        memory.is_in_optimizer ? "during the optimizer's step" : "during forward and backward"),
      figure("Forward and backward", seconds(fit.step_s), `${batch}optimizer ${fit.optimizer}${loopText(fit)}`)),
    fit.notes.map((note) => h("p", { class: "hint" }, `${note}.`)));
}

/** Return the checkpoints, gradients and outputs of the loop. */
function loopText(fit) {
  return [
    fit.checkpoint_count && `, ${fit.checkpoint_count} checkpoints (${fit.checkpoint})`,
    fit.accumulate > 1 && `, gradients of ${fit.accumulate} batches accumulated`,
    fit.keeps_gradients && ", gradients never freed",
    fit.keeps_outputs && ", outputs live until the next ones exist",
    fit.sharding.gpus > 1 && `; ${fit.sharding.gpus} GPUs, ${shardText(fit.sharding)}, of this ` +
      `${seconds(fit.communication_s)} communication`,
  ].filter(Boolean).join("");
}

function shardText({ shard, mixed_precision_param: param }) {
  const name = { none: "DDP", optimizer: "ZeroRedundancyOptimizer" }[shard] ?? `fully_shard (${shard || "full"})`;
  return param ? `${name}, float32 shards with ${param} compute` : name;
}

const figure = (name, value, more) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "more" }, more));

function parts(memory) {
  const rows = Object.entries(memory.parts).map(([name, size]) =>
    h("tr", {}, h("th", { scope: "row" }, name), number(bytes(size)), number(percent(size / memory.peak_bytes, 1))));
  return table("parts-title", "The peak", ["Part"], ["Size", "Of the peak"], rows);
}

function options(fit) {
  const excluded = (fit.excluded ?? []).map(({ name, reason }) => h("p", { class: "hint" }, `No ${name}: ${reason}.`));
  if (!fit.options.length) return h("section", {}, excluded);
  const rows = fit.options.map((option) => {
    const time = option.step_s === null ? "" : overhead(option.step_s / fit.step_s - 1);
    const code = [h("code", {}, option.code), option.note && h("span", { class: "hint" }, ` ${option.note}`)];
    return h("tr", {},
      h("th", { scope: "row" }, option.name), h("td", {}, option.fits ? "yes" : "no"), h("td", {}, code),
      number(bytes(option.reserved_bytes)), number(bytes(option.peak_bytes)), number(time));
  });
  const numbers = ["Reserved", "Peak", "Extra time"];
  const section = table("options-title", "What makes it fit", ["Option", "Fits", "Change"], numbers, rows);
  section.append(...excluded);
  return section;
}

const number = (text) => h("td", { class: "number" }, text);

function table(id, title, texts, numbers, rows) {
  const heads = [
    ...texts.map((name) => h("th", { scope: "col" }, name)),
    ...numbers.map((name) => h("th", { scope: "col", class: "number" }, name)),
  ];
  return h("section", {}, h("h2", { id }, title),
    h("div", { class: "scroll", role: "region", "aria-labelledby": id, tabindex: 0 },
      h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows))));
}
