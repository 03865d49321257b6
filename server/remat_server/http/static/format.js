/** Numbers with units, and states in words. */

const SPACE = "\u00a0"; // a number stays with its unit
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 7.45 GiB. */
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

/** 12.3 ms. */
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

/** 4.35%. */
export function percent(share, decimals = 2) {
  if (share === null || share === undefined) return "";
  return `${(share * 100).toFixed(decimals)}%`;
}

/** 0.50%; what is not nothing is not written as nothing. */
export function gap(share) {
  if (share === null || share === undefined) return "unknown";
  return share > 0 && percent(share) === "0.00%" ? "under 0.01%" : percent(share);
}

/** +4.35%, and 0.00% for nothing. */
export function overhead(share) {
  const text = percent(share);
  return share > 0 && text !== "0.00%" ? `+${text}` : text.replace("-", "−");
}

/** 12,345. */
export const count = (number) => number.toLocaleString("en");

/** "1 run", "2 runs". */
export const plural = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** 12 s, 5 min, 3 h, 2 d. */
export function age(elapsed) {
  const time = Math.max(0, elapsed);
  if (time < 60) return `${Math.floor(time)} s`;
  if (time < 3600) return `${Math.floor(time / 60)} min`;
  if (time < 86400) return `${Math.floor(time / 3600)} h`;
  return `${Math.floor(time / 86400)} d`;
}

/** 2026-11-21 09:40, local time. */
export function moment(epoch) {
  const at = new Date(epoch * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return (
    `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
    `${two(at.getHours())}:${two(at.getMinutes())}`
  );
}

/** What a job is called: of a dotted path, the class. */
export const title = (job) =>
  (/^[\w.]+$/.test(job.model) && job.model.split(".").at(-1)) || job.model || "bare graph";

/** With a capital at its beginning. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** What became of a plan, in words. */
export const PLAN_STATUS = {
  OPTIMAL: "Proved within the gap that was asked for",
  FEASIBLE: "Fits the budget; not proved to be within the gap",
};

/** What to do about it. */
export const PLAN_ADVICE = {
  OPTIMAL: "",
  FEASIBLE: "Not proved for every schedule in this order: raise the time limit or the gap.",
};

/** For which schedules a bound is proved. */
export const SCOPE = {
  slots: "for the places offered for recomputation",
  order: "for every schedule in this order",
  "all orders": "for every schedule",
};

/** What a search is doing. */
export const PHASE = {
  cost: "looking for the least extra time",
  peak: "looking for the smallest peak",
};
