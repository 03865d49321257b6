/** Requests to the service, with the API key if it needs one; errors are problem documents. */

import { askForKey } from "./dialogs.js";
import { byId } from "./dom.js";

const STORAGE_NAME = "remat-key";
let key = sessionStorage.getItem(STORAGE_NAME);
let openDialog = null; // promise of the key dialog
let isDeclined = false;
let clockSkew = 0; // milliseconds

/** An RFC 9457 problem document, or a service that does not respond (status 0). */
export class Problem extends Error {
  constructor(document) {
    super(document.detail || document.title || "the request failed");
    this.title = document.title || "";
    this.status = document.status ?? 0;
  }
}

/**
 * Return the response of a successful request. Throws `Problem`. After a 401, asks the user for a key
 * and retries. Once the user has declined, only requests that the user triggers (`ask`) ask again.
 */
export async function request(path, { ask = false, headers = {}, ...options } = {}) {
  if (ask) isDeclined = false;
  for (;;) {
    const usedKey = key;
    const response = await sent(path, { ...options, headers: { ...headers, ...authorization() } });
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw problem;
    if (key === usedKey && (isDeclined || !(await newKey(usedKey, problem.message)))) throw problem;
  }
}

/** Return the service's time in seconds since 1970, since this machine's clock may be wrong. */
export const now = () => (Date.now() + clockSkew) / 1000;

/** Return the JSON of a response. */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/** Let the user replace or delete the key. */
export async function changeKey() {
  isDeclined = false;
  await newKey(null, "Requests to this service use this key.");
}

async function sent(path, options) {
  try {
    const sent = Date.now();
    const response = await fetch(path, { cache: "no-store", ...options });
    compareClocks(Date.parse(response.headers.get("Date")), sent, Date.now());
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ title: "No response", detail: "The service does not respond. Is it running?" });
  }
}

/** Set the clock skew: the service dated its response, in whole seconds, between `sent` and `received`. */
function compareClocks(date, sent, received) {
  if (date < sent - 2000) clockSkew = date - sent;
  else if (date > received + 2000) clockSkew = date - received;
  else clockSkew = 0;
}

const authorization = () => (key ? { Authorization: `Bearer ${key}` } : {});

async function problemOf(response) {
  try {
    return new Problem(await response.json());
  } catch {
    return new Problem({ status: response.status, detail: `The service responded with status ${response.status}.` });
  }
}

/** Ask for a key, in one dialog for all waiting requests. Return false if the user declines. */
async function newKey(usedKey, reason) {
  openDialog ??= askForKey(usedKey ? `The service does not accept this key: ${reason}` : reason, key);
  const newValue = await openDialog;
  openDialog = null;
  if (newValue === null) {
    isDeclined = true;
  } else {
    key = newValue || null;
    if (key) sessionStorage.setItem(STORAGE_NAME, key);
    else sessionStorage.removeItem(STORAGE_NAME);
  }
  byId("key-button").hidden = false;
  dispatchEvent(new Event("remat-key"));
  return newValue !== null && newValue !== "";
}

if (key) byId("key-button").hidden = false;
