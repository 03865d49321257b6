/** From a file to a request's body: read, unzipped, recognised, and zipped again. */

import { bytes, count, plural } from "./format.js";

/**
 * What a file holds: `{kind, text, facts}`, `kind` "trace" or "graph". The text is sent as it is,
 * as JavaScript would lose the difference between 1 and 1.0. Raises Error, in words for the user.
 */
export async function readFile(file) {
  const text = await textOf(file);
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`${file.name} is not JSON (${error.message}). Choose what trace.save() wrote.`);
  }
  if (Array.isArray(data?.nodes)) return { kind: "trace", text, facts: traceFacts(data) };
  if (Array.isArray(data?.operations)) return { kind: "graph", text, facts: graphFacts(data) };
  throw new Error(`${file.name} is ${other(data)}. Choose the file that trace.save() wrote.`);
}

/** The JSON text of a request. `options` as in `SolveRequest.options`. */
export function requestText(document, question, options) {
  const parts = [`"${document.kind}":${document.text}`];
  for (const [name, value] of Object.entries({ ...question, options })) {
    if (value !== undefined) parts.push(`"${name}":${JSON.stringify(value)}`);
  }
  return `{${parts.join(",")}}`;
}

/** Gzipped, as a Blob. */
export function gzipped(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
  return new Response(stream).blob();
}

async function textOf(file) {
  const head = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  if (head[0] === 0x50 && head[1] === 0x4b) {
    throw new Error(
      `${file.name} is an archive, perhaps a .pt2 file: those can hold code and are not read. ` +
        "Trace the model with remat.trace and choose what trace.save() wrote.",
    );
  }
  let stream = file.stream();
  const isZipped = head[0] === 0x1f && head[1] === 0x8b;
  if (isZipped) stream = stream.pipeThrough(new DecompressionStream("gzip"));
  let data;
  try {
    data = await new Response(stream).arrayBuffer();
  } catch {
    throw new Error(`${file.name} cannot be ${isZipped ? "unzipped: it is cut off or damaged" : "read"}.`);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    throw new Error(`${file.name} is no text, so no JSON. Choose what trace.save() wrote.`);
  }
}

function traceFacts(trace) {
  const operations = trace.nodes.filter((node) => !node?.view);
  const unknown = operations.filter((node) => (node?.cost_s ?? null) === null).length;
  const facts = [`${text(trace.model) || "a model without a name"}`];
  facts.push(plural(operations.length, "operation"));
  if (trace.device) facts.push(`traced on ${text(trace.device)}`);
  if (!unknown) facts.push(`costs: ${sources(operations)}`);
  else facts.push("no costs: the service will measure them, where it has the device");
  return facts.join("; ");
}

function sources(operations) {
  const found = [...new Set(operations.map((node) => text(node?.cost_source) || "unknown"))];
  return found.length > 3 ? `${found.slice(0, 3).join(", ")}, …` : found.join(", ");
}

function graphFacts(graph) {
  const made = (graph.values ?? []).reduce((sum, value) => sum + (Number(value?.size_bytes) || 0), 0);
  const values = count((graph.values ?? []).length);
  return `a bare graph; ${plural(graph.operations.length, "operation")}; ${values} values of ${bytes(made)}`;
}

function other(data) {
  const format = text(data?.format);
  if (format === "remat.plan") return "a plan, an answer of the service";
  if (format === "remat.program") return "a program, an answer of the service";
  if (data?.trace || data?.graph) return "a whole request";
  return "JSON, but neither a trace nor a graph";
}

const text = (value) => (typeof value === "string" ? value.slice(0, 200) : "");
