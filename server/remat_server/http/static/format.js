/** Formats numbers with units, and describes states. */

const SPACE = "\u00a0"; // no line break between a number and its unit
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Format bytes: 7.45 GiB. */
export function bytes(size) {
  if (size === null || size === undefined) return "";
  let unit = 0;
  let scaled = Math.abs(size);
  while (scaled >= 1024 && unit < UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  const decimals = unit === 0 ? 0 : scaled < 10 ? 2 : scaled < 100 ? 1 : 0;
  return `${size < 0 ? "−" : ""}${scaled.toFixed(decimals)}${SPACE}${UNITS[unit]}`;
}

/** Format seconds: 12.3 ms. */
export function seconds(time) {
  if (time === null || time === undefined) return "";
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    if (Math.abs(time) * factor >= 0.9995) return `${digits(time * factor)}${SPACE}${unit}`;
  }
  return time ? `${digits(time * 1e9)}${SPACE}ns` : `0${SPACE}s`;
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0);
}

/** Format a fraction: 4.35%. */
export function percent(share, decimals = 2) {
  if (share === null || share === undefined) return "";
  return `${(share * 100).toFixed(decimals)}%`;
}

/** Format a gap: 0.50%, or "under 0.01%" for a gap that would round to 0.00%. */
export function gap(share) {
  if (share === null || share === undefined) return "unknown";
  return share > 0 && percent(share) === "0.00%" ? "under 0.01%" : percent(share);
}

/** Format an overhead: +4.35%, or 0.00%. */
export function overhead(share) {
  const text = percent(share);
  return share > 0 && text !== "0.00%" ? `+${text}` : text.replace("-", "−");
}

/** Format a count: 12,345. */
export const count = (number) => number.toLocaleString("en");

/** Format a count with its noun: "1 run", "2 runs". */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Format an elapsed time in seconds: 12 s, 5 min, 3 h, 2 d. */
export function age(elapsed) {
  const time = Math.max(0, elapsed);
  if (time < 60) return `${Math.floor(time)} s`;
  if (time < 3600) return `${Math.floor(time / 60)} min`;
  if (time < 86400) return `${Math.floor(time / 3600)} h`;
  return `${Math.floor(time / 86400)} d`;
}

/** Format seconds since 1970 as local time: 2026-11-21 09:40. */
export function moment(epoch) {
  const date = new Date(epoch * 1000);
  const twoDigits = (number) => String(number).padStart(2, "0");
  return (
    `${date.getFullYear()}-${twoDigits(date.getMonth() + 1)}-${twoDigits(date.getDate())} ` +
    `${twoDigits(date.getHours())}:${twoDigits(date.getMinutes())}`
  );
}

/** Return a job's title: the class name of a dotted path, or the model's name. */
export const title = (job) =>
  (/^[\w.]+$/.test(job.model) && job.model.split(".").at(-1)) || job.model ||
  (job.kind === "why" ? "memory snapshot" : "bare graph");

/** Capitalize the first letter. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Descriptions of a plan's status. */
export const PLAN_STATUS = {
  OPTIMAL: "Proved within the requested gap",
  FEASIBLE: "Fits the budget; not proved to be within the requested gap",
};

/** Advice by a plan's status. */
export const PLAN_ADVICE = {
  OPTIMAL: "",
  FEASIBLE: "Not proved for every schedule in this order: raise the time limit or the gap.",
};

/** Descriptions of the space that a bound is proved for. */
export const SCOPE = {
  slots: "for the slots available for recomputation",
  order: "for every schedule in the plan's order",
  "all orders": "for every schedule",
};

/** Descriptions of the phases of a search. */
export const PHASE = {
  cost: "minimizing the extra time",
  peak: "minimizing the peak",
};
