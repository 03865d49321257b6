/** Requests to the service, with the key where it wants one; errors as problem documents. */

import { askForKey } from "./dialogs.js";
import { byId } from "./dom.js";

const STORED = "remat-key";
let key = sessionStorage.getItem(STORED);
let asking = null;
let declined = false;
let skew = 0; // milliseconds

/** An RFC 9457 document, or a network that does not answer (status 0). */
export class Problem extends Error {
  constructor(document) {
    super(document.detail || document.title || "the request failed");
    this.title = document.title || "";
    this.status = document.status ?? 0;
    this.least = document.min_feasible_bytes ?? null;
  }
}

/**
 * The response, once it is a good one. Raises `Problem`. A 401 asks for the key and tries again;
 * once the user has declined, only requests that the user makes (`ask`) ask anew.
 */
export async function request(path, { ask = false, headers = {}, ...options } = {}) {
  if (ask) declined = false;
  for (;;) {
    const used = key;
    const response = await sent(path, { ...options, headers: { ...headers, ...authorization() } });
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw problem;
    if (key === used && (declined || !(await newKey(used, problem.message)))) throw problem;
  }
}

/** The service's time, in seconds since 1970: this machine's clock may be wrong. */
export const now = () => (Date.now() + skew) / 1000;

/** The JSON of a response. */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/** Ask for another key, or forget it, because the user wants to. */
export async function changeKey() {
  declined = false;
  await newKey(null, "Requests to this service carry this key.");
}

async function sent(path, options) {
  try {
    const sent = Date.now();
    const response = await fetch(path, { cache: "no-store", ...options });
    compareClocks(Date.parse(response.headers.get("Date")), sent, Date.now());
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ title: "No answer", detail: "The service does not answer. Is it running?" });
  }
}

/** The service dated its answer, in whole seconds, between `sent` and `got`. */
function compareClocks(date, sent, got) {
  if (date < sent - 2000) skew = date - sent;
  else if (date > got + 2000) skew = date - got;
  else skew = 0;
}

const authorization = () => (key ? { Authorization: `Bearer ${key}` } : {});

async function problemOf(response) {
  try {
    return new Problem(await response.json());
  } catch {
    return new Problem({ status: response.status, detail: `The service answered ${response.status}.` });
  }
}

/** One dialog at a time, however many requests wait for it. False where the user declines. */
async function newKey(used, why) {
  asking ??= askForKey(used ? `The service does not accept this key: ${why}` : why, key);
  const given = await asking;
  asking = null;
  if (given === null) {
    declined = true;
  } else {
    key = given || null;
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  }
  byId("key-button").hidden = false;
  dispatchEvent(new Event("remat-key"));
  return given !== null && given !== "";
}

if (key) byId("key-button").hidden = false;
