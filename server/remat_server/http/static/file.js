/** Turns a file into the body of a request: reads, unzips, checks and gzips it. */

import { bytes, count, plural } from "./format.js";

/**
 * Read a file; return `{kind, text, facts}` with the kind "trace", "graph" or "snapshot" (then with its
 * `blob`: a memory snapshot, or the text of an error). The text is sent unchanged, because JavaScript does not distinguish 1 from 1.0. Throws Error with a message for the user.
 */
export async function readFile(file) {
  if (await isSnapshot(file)) return { kind: "snapshot", blob: file, facts: `a snapshot of ${bytes(file.size)}` };
  const text = await textOf(file);
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`${file.name} is not JSON (${error.message}). Choose the file that trace.save() wrote.`);
  }
  if (Array.isArray(data?.nodes)) return { kind: "trace", text, facts: traceFacts(data) };
  if (Array.isArray(data?.operations)) return { kind: "graph", text, facts: graphFacts(data) };
  throw new Error(`${file.name} is ${describeOther(data)}. Choose the file that trace.save() wrote.`);
}

/** Return the JSON text of a request. `options` are those of `SolveRequest.options`. */
export function requestText(document, budgets, options) {
  const parts = [`"${document.kind}":${document.text}`];
  for (const [name, value] of Object.entries({ ...budgets, options })) {
    if (value !== undefined) parts.push(`"${name}":${JSON.stringify(value)}`);
  }
  return `{${parts.join(",")}}`;
}

/** True for a pickle, and for text that has an out-of-memory error. */
async function isSnapshot(file) {
  const [first] = new Uint8Array(await file.slice(0, 1).arrayBuffer());
  if (first === 0x80) return true;
  return first !== 0x7b && file.size < 2 ** 24 && (await file.text()).includes("out of memory");
}

/** Return the gzipped text or file as a Blob. */
export function gzipped(content) {
  const stream = new Blob([content]).stream().pipeThrough(new CompressionStream("gzip"));
  return new Response(stream).blob();
}

async function textOf(file) {
  const head = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  if (head[0] === 0x50 && head[1] === 0x4b) {
    throw new Error(
      `${file.name} is an archive, perhaps a .pt2 file, which can contain code and is not read. ` +
        "Trace the model with remat.trace, and choose the file that trace.save() wrote.",
    );
  }
  let stream = file.stream();
  const isZipped = head[0] === 0x1f && head[1] === 0x8b;
  if (isZipped) stream = stream.pipeThrough(new DecompressionStream("gzip"));
  let data;
  try {
    data = await new Response(stream).arrayBuffer();
  } catch {
    throw new Error(`${file.name} cannot be ${isZipped ? "unzipped: it is incomplete or damaged" : "read"}.`);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    throw new Error(`${file.name} is not text, so it is not JSON. Choose the file that trace.save() wrote.`);
  }
}

function traceFacts(trace) {
  const operations = trace.nodes.filter((node) => !node?.view);
  const unmeasured = operations.filter((node) => (node?.cost_s ?? null) === null).length;
  const facts = [`${text(trace.model) || "a model without a name"}`];
  facts.push(plural(operations.length, "operation"));
  if (trace.device) facts.push(`traced on ${text(trace.device)}`);
  if (!unmeasured) facts.push(`costs: ${sources(operations)}`);
  else facts.push("no costs: the service measures them, if it has the device");
  return facts.join("; ");
}

function sources(operations) {
  const names = [...new Set(operations.map((node) => text(node?.cost_source) || "unknown"))];
  return names.length > 3 ? `${names.slice(0, 3).join(", ")}, …` : names.join(", ");
}

function graphFacts(graph) {
  const totalBytes = (graph.values ?? []).reduce((sum, value) => sum + (Number(value?.size_bytes) || 0), 0);
  const values = count((graph.values ?? []).length);
  return `a bare graph; ${plural(graph.operations.length, "operation")}; ${values} values of ${bytes(totalBytes)}`;
}

function describeOther(data) {
  const format = text(data?.format);
  if (format === "remat.plan") return "a plan, which is a result of the service";
  if (format === "remat.program") return "a program, which is a result of the service";
  if (data?.trace || data?.graph) return "a complete request";
  return "JSON, but neither a trace nor a graph";
}

const text = (value) => (typeof value === "string" ? value.slice(0, 200) : "");
