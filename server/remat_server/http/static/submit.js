/** The form: a file, a budget or many, and how to solve. */

import { json } from "./api.js";
import { byId, h, setText, tell } from "./dom.js";
import { readFile, gzipped, requestText } from "./file.js";
import { bytes, plural, sentence } from "./format.js";

const DEVICES = ["h200", "h100", "b200", "a100", "l40s", "l4", "rtx4090", "v100", "t4", "mi300x", "cpu"];

let chosen = null; // what readFile made of the file
let reading = 0;

/** Connect the form. `accepted(job)` is called with each job that the service took. */
export function connectForm(accepted) {
  byId("devices").append(...DEVICES.map((name) => h("option", { value: `roofline:${name}` }, name)));
  byId("file").addEventListener("change", (event) => take(event.target.files[0]));
  connectDrop(byId("drop"));
  for (const radio of document.querySelectorAll("input[name=kind]")) {
    radio.addEventListener("change", showKind);
  }
  showKind(); // the browser may have kept another choice over a reload
  byId("submit").addEventListener("submit", (event) => {
    event.preventDefault();
    during(async () => accepted(await send("")));
  });
  byId("check").addEventListener("click", () =>
    during(async () => setText(byId("submit-note"), sizes(await send("?dry_run=true")))),
  );
  if (byId("file").files.length) take(byId("file").files[0]);
}

/** Ask for this budget next time. */
export function propose(sizeBytes) {
  document.querySelector("input[name=kind][value=solve]").checked = true;
  showKind();
  byId("budget").value = String(sizeBytes);
  byId(chosen ? "budget" : "file").focus();
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
    take(event.dataTransfer.files[0]);
  });
}

async function take(file) {
  chosen = null;
  reading += 1;
  const mine = reading;
  tell(byId("file-problem"), "");
  tell(byId("submit-problem"), "");
  setText(byId("submit-note"), "");
  setText(byId("file-facts"), file ? "Reading the file …" : "");
  if (!file) return;
  let found = null;
  let problem = "";
  try {
    found = await readFile(file);
  } catch (error) {
    problem = error.message;
  }
  if (mine !== reading) return; // another file was chosen meanwhile
  chosen = found;
  setText(byId("file-facts"), found ? found.facts : "");
  tell(byId("file-problem"), problem);
  byId("costs").disabled = found?.kind === "graph";
}

function kind() {
  return document.querySelector("input[name=kind]:checked").value;
}

function showKind() {
  const isSweep = kind() === "sweep";
  byId("budget-field").hidden = isSweep;
  byId("budgets-field").hidden = !isSweep;
  setText(byId("send"), isSweep ? "Sweep" : "Solve");
}

/** What the form asks, or an Error in words for the user with the field at fault. */
function question() {
  if (!chosen) throw wrong("file", "Choose a trace or a graph first.");
  const gap = number("gap", "The gap is a percentage, such as 0.5.");
  const strategy = {
    name: "auto",
    gap: Number((gap / 100).toPrecision(12)),
    time_limit: number("time-limit", "The time limit is in seconds, such as 60."),
  };
  const costs = chosen.kind === "trace" && byId("costs").value ? byId("costs").value : undefined;
  return requestText(chosen, budgets(), { strategy, costs });
}

function budgets() {
  if (kind() === "solve") {
    const budget = byId("budget").value.trim();
    if (!budget) throw wrong("budget", "Say a budget, such as 8GiB, 60% or min.");
    return { budget };
  }
  const parts = byId("budgets").value.split(",").map((part) => part.trim()).filter(Boolean);
  return { budgets: parts.length ? parts : undefined };
}

function number(id, message) {
  const text = byId(id).value.trim().replace(/\s*[%s]$/, "").replace(",", ".");
  const value = Number(text);
  if (!text || !Number.isFinite(value) || value < 0) throw wrong(id, message);
  return value;
}

function wrong(id, message) {
  return Object.assign(new Error(message), { field: byId(id) });
}

async function send(query) {
  const where = kind() === "solve" ? "/solve" : "/sweeps";
  const body = await gzipped(question());
  const headers = { "Content-Type": "application/json", "Content-Encoding": "gzip" };
  return json(where + query, { method: "POST", body, headers, ask: true });
}

/** Show what goes wrong, in place; one request at a time. */
async function during(work) {
  const buttons = [byId("send"), byId("check")];
  if (buttons[0].getAttribute("aria-disabled") === "true") return;
  for (const button of buttons) button.setAttribute("aria-disabled", "true");
  tell(byId("submit-problem"), "");
  setText(byId("submit-note"), "Sending …");
  try {
    await work();
    if (byId("submit-note").textContent === "Sending …") setText(byId("submit-note"), "");
  } catch (error) {
    setText(byId("submit-note"), "");
    const title = error.title ? `${error.title}: ` : "";
    tell(byId("submit-problem"), title + sentence(error.message));
    error.field?.focus();
  } finally {
    for (const button of buttons) button.removeAttribute("aria-disabled");
  }
}

function sizes(found) {
  const peak = found.baseline_peak_bytes;
  const parts = [plural(found.operations, "operation"), plural(found.values, "value")];
  if (found.constant_bytes) parts.push(`${bytes(found.constant_bytes)} constant memory`);
  parts.push(
    peak === null ? "peak known once costs are measured" : `peak without recomputation ${bytes(peak)}`,
  );
  return `The service would accept this: ${parts.join(", ")}.`;
}
