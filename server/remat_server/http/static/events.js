/** Server-sent events by fetch, as EventSource cannot send a key. */

import { Problem, request } from "./api.js";

const PAUSES_MS = [500, 1000, 2000, 5000, 10000];

/**
 * Call `heard(kind, data)` for each event of a job, from its first one on, until it is done or
 * `signal` aborts. Where the connection breaks it goes on after the last event that came, and
 * tells `broken(true)`, later `broken(false)`. Raises `Problem` where the service refuses.
 */
export async function watch(id, heard, broken, signal) {
  let last = "";
  let failures = 0;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(last && { "Last-Event-ID": last }) };
      const response = await request(`/jobs/${id}/events`, { headers, signal });
      broken(false);
      for await (const event of parsed(response.body)) {
        failures = 0;
        last = event.id || last;
        heard(event.kind, JSON.parse(event.data));
        if (event.kind === "done") return;
      }
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      const isRefused = error instanceof Problem && error.status > 0 && error.status < 500;
      if (isRefused && error.status !== 429) throw error;
    }
    broken(true);
    await pause(PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)], signal);
    failures += 1;
  }
}

async function* parsed(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let event = blank();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split(/\r?\n/);
    text = lines.pop();
    for (const line of lines) {
      if (line) {
        take(line, event);
        continue;
      }
      if (event.data) yield event;
      event = blank();
    }
  }
}

const blank = () => ({ kind: "message", id: "", data: "" });

function take(line, event) {
  const colon = line.indexOf(":");
  if (colon <= 0) return; // a comment: the stream is alive
  const field = line.slice(0, colon);
  const value = line.slice(colon + 1).replace(/^ /, "");
  if (field === "event") event.kind = value;
  else if (field === "id") event.id = value;
  else if (field === "data") event.data += event.data ? `\n${value}` : value;
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
