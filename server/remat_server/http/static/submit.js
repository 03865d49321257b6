/** The form that submits a job: a file, one or more budgets, and solve options. */

import { json } from "./api.js";
import { DEVICES, GPUS, OPTIMIZERS } from "./choices.js"; // the service writes it
import { byId, h, setText, showMessage } from "./dom.js";
import { readFile, gzipped, requestText } from "./file.js";
import { bytes, plural, sentence } from "./format.js";

let chosenDocument = null; // the result of readFile
let latestFile = 0;

/** Connect the form. `onAccepted(job)` is called with each job that the service accepts. */
export function connectForm(onAccepted) {
  byId("devices").append(...DEVICES.map((name) => h("option", { value: `roofline:${name}` }, name)));
  byId("gpu").append(...GPUS.map((name) => h("option", { value: name }, name)));
  byId("optimizer").append(...OPTIMIZERS.map((name) => h("option", { value: name }, name)));
  byId("file").addEventListener("change", (event) => chooseFile(event.target.files[0]));
  connectDrop(byId("drop"));
  for (const radio of document.querySelectorAll("input[name=kind]")) {
    radio.addEventListener("change", showKind);
  }
  showKind(); // the browser may restore another choice after a reload
  byId("submit").addEventListener("submit", (event) => {
    event.preventDefault();
    runRequest(async () => onAccepted(await send("")));
  });
  byId("check").addEventListener("click", () =>
    runRequest(async () => setText(byId("submit-note"), describeSizes(await send("?dry_run=true")))),
  );
  if (byId("file").files.length) chooseFile(byId("file").files[0]);
}

/** Put a budget into the form. */
export function proposeBudget(sizeBytes) {
  document.querySelector("input[name=kind][value=solve]").checked = true;
  showKind();
  byId("budget").value = String(sizeBytes);
  byId(chosenDocument ? "budget" : "file").focus();
}

function connectDrop(area) {
  area.addEventListener("dragover", (event) => {
    event.preventDefault();
    area.classList.add("over");
  });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    if (!event.dataTransfer.files.length) return;
    byId("file").files = event.dataTransfer.files;
    chooseFile(event.dataTransfer.files[0]);
  });
}

async function chooseFile(file) {
  chosenDocument = null;
  latestFile += 1;
  const thisFile = latestFile;
  showMessage(byId("file-problem"), "");
  showMessage(byId("submit-problem"), "");
  setText(byId("submit-note"), "");
  setText(byId("file-facts"), file ? "Reading the file …" : "");
  if (!file) return;
  let parsed = null;
  let problem = "";
  try {
    parsed = await readFile(file);
  } catch (error) {
    problem = error.message;
  }
  if (thisFile !== latestFile) return; // the user has chosen another file
  chosenDocument = parsed;
  setText(byId("file-facts"), parsed ? parsed.facts : "");
  if (parsed?.kind === "snapshot") {
    document.querySelector("input[name=kind][value=why]").checked = true;
    showKind();
  }
  showMessage(byId("file-problem"), problem);
  for (const id of ["costs", "split", "offload"]) byId(id).disabled = parsed?.kind === "graph";
}

function kind() {
  return document.querySelector("input[name=kind]:checked").value;
}

function showKind() {
  const isSweep = kind() === "sweep";
  const isFit = kind() === "fit";
  byId("fit-fields").hidden = !isFit;
  byId("solve-fields").hidden = isFit || kind() === "why";
  byId("check").hidden = kind() === "why";
  for (const id of ["budget", "infeasible", "split", "offload"]) byId(`${id}-field`).hidden = isSweep;
  byId("budgets-field").hidden = !isSweep;
  setText(byId("send"), { sweep: "Sweep", fit: "Predict", why: "Explain" }[kind()] ?? "Solve");
}

/** Return the text of the request. Throws Error with a message for the user and the invalid field. */
function readForm() {
  if (!chosenDocument) throw fieldError("file", "Choose a trace or a graph first.");
  if (kind() === "why") return readSnapshot();
  if (chosenDocument.kind === "snapshot") throw fieldError("file", "This is a memory snapshot: choose Why, or a trace.");
  if (kind() === "fit") return readFitForm();
  const gap = number("gap", "The gap is a percentage, such as 0.5.");
  const strategy = {
    name: "auto",
    gap: Number((gap / 100).toPrecision(12)),
    time_limit: number("time-limit", "The time limit is in seconds, such as 60."),
  };
  const costs = chosenDocument.kind === "trace" && byId("costs").value ? byId("costs").value : undefined;
  return requestText(chosenDocument, budgets(), { strategy, costs });
}

/** Return the fields of several GPUs; none for one. */
function readShards() {
  const gpus = optionalNumber("gpus", "The number of GPUs is a whole number, such as 8.");
  if (gpus === undefined || gpus === 1) return {};
  const [shard, views] = byId("shard").value.split(" ");
  const [param, reduce] = byId("mixed").value.split(" ");
  return {
    gpus,
    shard: shard === "hybrid" ? `hybrid:${number("group", "The GPUs of a group are a whole number, such as 8.")}` : shard,
    gradient_as_bucket_view: views === "views" || undefined,
    mixed_precision_param: param || undefined,
    mixed_precision_reduce: reduce,
  };
}

function readSnapshot() {
  if (chosenDocument.kind !== "snapshot") {
    throw fieldError("file", "Choose the file that torch.cuda.memory._dump_snapshot wrote, or the text of an error.");
  }
  return chosenDocument.blob;
}

function readFitForm() {
  if (chosenDocument.kind !== "trace") throw fieldError("file", "A bare graph has no parameters: choose a trace.");
  const gibibytes = optionalNumber("usable", "The usable memory is in GiB, such as 75.");
  return requestText(chosenDocument, {
    optimizer: byId("optimizer").value,
    gpu: byId("gpu").value || undefined,
    memory_bytes: gibibytes === undefined ? undefined : Math.max(1, Math.round(gibibytes * 2 ** 30)),
    batch: optionalNumber("batch", "The batch size is a whole number, such as 64."),
    checkpoint: byId("checkpoint").value || undefined,
    accumulate: optionalNumber("accumulate", "The number of accumulated batches is a whole number, such as 8."),
    keeps_gradients: byId("gradients").value === "kept" || undefined,
    keeps_outputs: byId("outputs").value === "kept" || undefined,
    ...readShards(),
  });
}

const optionalNumber = (id, message) => (byId(id).value.trim() ? number(id, message) : undefined);

function budgets() {
  if (kind() === "solve") {
    const budget = byId("budget").value.trim();
    if (!budget) throw fieldError("budget", "Enter a budget, such as 8GiB, 60% or min.");
    return { budget, infeasible: byId("infeasible").value || undefined, ...passes() };
  }
  const parts = byId("budgets").value.split(",").map((part) => part.trim()).filter(Boolean);
  return { budgets: parts.length ? parts : undefined };
}

/** Return the options that change the step before it is solved; a bare graph has none. */
function passes() {
  if (chosenDocument.kind !== "trace") return {};
  const split = byId("split").value;
  return { split: Number(split) || split || undefined, offload: byId("offload").value || undefined };
}

function number(id, message) {
  const text = byId(id).value.trim().replace(/\s*[%s]$/, "").replace(",", ".");
  const value = Number(text);
  if (!text || !Number.isFinite(value) || value < 0) throw fieldError(id, message);
  return value;
}

function fieldError(id, message) {
  return Object.assign(new Error(message), { field: byId(id) });
}

async function send(query) {
  const path = { solve: "/solve", sweep: "/sweeps", fit: "/fit", why: "/why" }[kind()];
  const body = await gzipped(readForm());
  const media = kind() === "why" ? "application/octet-stream" : "application/json";
  const headers = { "Content-Type": media, "Content-Encoding": "gzip" };
  return json(path + query, { method: "POST", body, headers, ask: true });
}

/** Run a request of the form, one at a time, and show its problem next to the form. */
async function runRequest(work) {
  const buttons = [byId("send"), byId("check")];
  if (buttons[0].getAttribute("aria-disabled") === "true") return;
  for (const button of buttons) button.setAttribute("aria-disabled", "true");
  showMessage(byId("submit-problem"), "");
  setText(byId("submit-note"), "Sending …");
  try {
    await work();
    if (byId("submit-note").textContent === "Sending …") setText(byId("submit-note"), "");
  } catch (error) {
    setText(byId("submit-note"), "");
    const title = error.title ? `${error.title}: ` : "";
    showMessage(byId("submit-problem"), title + sentence(error.message));
    error.field?.focus();
  } finally {
    for (const button of buttons) button.removeAttribute("aria-disabled");
  }
}

function describeSizes(sizes) {
  const peak = sizes.baseline_peak_bytes;
  const parts = [plural(sizes.operations, "operation"), plural(sizes.values, "value")];
  if (sizes.constant_bytes) parts.push(`${bytes(sizes.constant_bytes)} constant memory`);
  parts.push(
    peak === null ? "peak unknown until the costs are measured" : `peak without recomputation ${bytes(peak)}`,
  );
  return `The service accepts this request: ${parts.join(", ")}.`;
}
