/** The chart of a search: the best schedule so far and the proved bound, over time. */

import { s } from "./dom.js";
import { bytes, percent, seconds } from "./format.js";

const WIDTH = 720;
const HEIGHT = 230;
const LEFT = 70;
const RIGHT = 14;
const TOP = 14;
const BOTTOM = 42;

/** Points of a search by stretch: a phase, or one solve of a sweep, in which time only goes on. */
export class History {
  stretches = [];

  /** Take an event's data. */
  add(progress) {
    let current = this.stretches.at(-1);
    const last = current?.points.at(-1);
    const isOther = current?.phase !== progress.phase || current?.budget !== progress.budget_bytes;
    if (isOther || progress.elapsed_s < last.elapsed_s) {
      current = { phase: progress.phase, budget: progress.budget_bytes, points: [] };
      this.stretches.push(current);
    }
    current.points.push(progress);
  }

  /** The latest stretch, as far as it can be drawn. */
  get latest() {
    return this.stretches.at(-1) ?? null;
  }
}

/** An amount of a phase with its unit: bytes of "peak", extra time of all others. */
export const amount = (phase, value) => (phase === "peak" ? bytes(value) : percent(value));

/** Whether all that a stretch tells is one number: no step, and no bound but that. */
export function isFlat(stretch) {
  const known = stretch.points.flatMap((p) => [p.incumbent, p.bound]).filter((v) => v !== null);
  const high = Math.max(...known);
  return high - Math.min(...known) <= 1e-6 * Math.abs(high);
}

/** The picture up to `end` seconds, as an SVG element; null where there is nothing to see. */
export function chart(stretch, end) {
  const points = stretch?.points.filter((point) => point.incumbent !== null || point.bound !== null) ?? [];
  const known = points.flatMap((p) => [p.incumbent, p.bound]).filter((v) => v !== null);
  if (!points.length || end <= points[0].elapsed_s) return null;
  const [low, high] = limits(known, stretch.phase, isFlat(stretch));
  const x = (time) => LEFT + (time / end) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const floor = HEIGHT - BOTTOM;
  const parts = [];
  for (const tick of ticks(low, high)) {
    parts.push(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    const label = stretch.phase === "peak" ? bytes(tick) : tickPercent(tick, high - low);
    parts.push(s("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, label));
  }
  for (const tick of ticks(0, end, 6)) {
    parts.push(s("line", { class: "axis", x1: x(tick), x2: x(tick), y1: floor, y2: floor + 4 }));
    parts.push(s("text", { x: x(tick), y: floor + 18, "text-anchor": "middle" }, tickSeconds(tick, end)));
  }
  parts.push(s("path", { class: "between", d: area(points, end, x, y) }));
  parts.push(s("path", { class: "bound", d: steps(points, "bound", end, x, y) }));
  parts.push(s("path", { class: "incumbent", d: steps(points, "incumbent", end, x, y) }));
  const what = stretch.phase === "peak" ? "peak" : "extra time";
  const isBounded = points.some((point) => point.bound !== null);
  parts.push(...legend(`best so far (${what})`, isBounded ? "proved bound" : null));
  const label = `The ${what} of the best schedule and its proved bound, over ${seconds(end)}`;
  return s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label }, parts);
}

function limits(known, phase, flat) {
  let low = Math.min(...known);
  let high = Math.max(...known);
  // A spread too small to matter, or of rounding, is not blown up.
  const spread = Math.max(high - low, Math.abs(high) * 0.02, phase === "peak" ? 64 : 1e-4);
  if (flat || low < 1.5 * spread) low = 0;
  else low -= 0.1 * spread;
  return [low, high + 0.1 * spread];
}

/** Round numbers from `low` to `high`, about `count` of them. */
function ticks(low, high, count = 4) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
  return found;
}

function tickPercent(value, spread) {
  return percent(value, spread >= 0.05 ? 0 : spread >= 0.005 ? 1 : spread >= 0.0005 ? 2 : 3);
}

const tickSeconds = (time, end) =>
  end < 1 ? `${Number((time * 1000).toPrecision(3))} ms` : `${Number(time.toPrecision(3))} s`;

/** A staircase: what is known holds until something better is. */
function steps(points, name, end, x, y) {
  const known = points.filter((point) => point[name] !== null);
  if (!known.length) return "";
  const data = known.map((p, i) => (i ? `H${at(x(p.elapsed_s))}V${at(y(p[name]))}` : start(p, name, x, y)));
  return `${data.join("")}H${at(x(end))}`;
}

const start = (point, name, x, y) => `M${at(x(point.elapsed_s))} ${at(y(point[name]))}`;

const at = (value) => value.toFixed(1);

/** Between the two staircases, where both are known. */
function area(points, end, x, y) {
  const both = points.filter((point) => point.incumbent !== null && point.bound !== null);
  if (!both.length) return "";
  let lower = "";
  let right = at(x(end));
  for (const point of [...both].reverse()) {
    lower += `H${right}V${at(y(point.bound))}`;
    right = at(x(point.elapsed_s));
  }
  return `${steps(both, "incumbent", end, x, y)}${lower}H${right}Z`;
}

function legend(best, bound) {
  const y = HEIGHT - 6;
  const second = LEFT + 200;
  const first = [
    s("line", { class: "incumbent", x1: LEFT, x2: LEFT + 22, y1: y - 4, y2: y - 4 }),
    s("text", { x: LEFT + 28, y }, best),
  ];
  if (bound === null) return first;
  return [
    ...first,
    s("line", { class: "bound", x1: second, x2: second + 22, y1: y - 4, y2: y - 4 }),
    s("text", { x: second + 28, y }, bound),
  ];
}
