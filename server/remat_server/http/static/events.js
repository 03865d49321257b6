/** Reads server-sent events with fetch, because EventSource cannot send the API key. */

import { Problem, request } from "./api.js";

const PAUSES_MS = [500, 1000, 2000, 5000, 10000];

/**
 * Call `onEvent(kind, data)` for each event of a job, from the first one, until the job is done or
 * `signal` aborts. After a lost connection, calls `onBroken(true)`, resumes after the last event, and
 * calls `onBroken(false)`. Throws `Problem` if the service refuses the request.
 */
export async function watch(id, onEvent, onBroken, signal) {
  let lastId = "";
  let failures = 0;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(lastId && { "Last-Event-ID": lastId }) };
      const response = await request(`/jobs/${id}/events`, { headers, signal });
      onBroken(false);
      for await (const event of parsed(response.body)) {
        failures = 0;
        lastId = event.id || lastId;
        onEvent(event.kind, JSON.parse(event.data));
        if (event.kind === "done") return;
      }
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      const isRefused = error instanceof Problem && error.status > 0 && error.status < 500;
      if (isRefused && error.status !== 429) throw error;
    }
    onBroken(true);
    await pause(PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)], signal);
    failures += 1;
  }
}

async function* parsed(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let event = emptyEvent();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split(/\r?\n/);
    text = lines.pop();
    for (const line of lines) {
      if (line) {
        readField(line, event);
        continue;
      }
      if (event.data) yield event;
      event = emptyEvent();
    }
  }
}

const emptyEvent = () => ({ kind: "message", id: "", data: "" });

function readField(line, event) {
  const colon = line.indexOf(":");
  if (colon <= 0) return; // a keep-alive comment
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
