/** The chart of a search: the incumbent and the proved bound over time. */

import { s } from "./dom.js";
import { bytes, percent, seconds } from "./format.js";

const WIDTH = 720;
const HEIGHT = 230;
const LEFT = 70;
const RIGHT = 14;
const TOP = 14;
const BOTTOM = 42;

/** The points of a search by stage: a phase, one solve of a sweep, or one kind of option. Time increases within a stage. */
export class History {
  stages = [];

  /** Add the data of an event. */
  add(progress) {
    let current = this.stages.at(-1);
    const last = current?.points.at(-1);
    const title = progress.stage ?? "";
    const isOther =
      current?.phase !== progress.phase ||
      current?.budget !== progress.budget_bytes ||
      current?.title !== title;
    if (isOther || progress.elapsed_s < last.elapsed_s) {
      current = { phase: progress.phase, budget: progress.budget_bytes, title, points: [] };
      this.stages.push(current);
    }
    current.points.push(progress);
  }

  /** The latest stage; null if there is none. */
  get latest() {
    return this.stages.at(-1) ?? null;
  }
}

/** Format a value of a phase: bytes of the phase "peak", extra time of all others. */
export const amount = (phase, value) => (phase === "peak" ? bytes(value) : percent(value));

/** Return true if incumbent and bound of a stage have one constant value. */
export function isFlat(stage) {
  const values = stage.points.flatMap((p) => [p.incumbent, p.bound]).filter((v) => v !== null);
  const high = Math.max(...values);
  return high - Math.min(...values) <= 1e-6 * Math.abs(high);
}

/** Draw a stage up to `end` seconds, as an SVG element; null if it has no points to draw. */
export function chart(stage, end) {
  const points = stage?.points.filter((point) => point.incumbent !== null || point.bound !== null) ?? [];
  const values = points.flatMap((p) => [p.incumbent, p.bound]).filter((v) => v !== null);
  if (!points.length || end <= points[0].elapsed_s) return null;
  const [low, high] = limits(values, stage.phase, isFlat(stage));
  const x = (time) => LEFT + (time / end) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const floor = HEIGHT - BOTTOM;
  const parts = [];
  for (const tick of ticks(low, high)) {
    parts.push(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    const label = stage.phase === "peak" ? bytes(tick) : tickPercent(tick, high - low);
    parts.push(s("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, label));
  }
  for (const tick of ticks(0, end, 6)) {
    parts.push(s("line", { class: "axis", x1: x(tick), x2: x(tick), y1: floor, y2: floor + 4 }));
    parts.push(s("text", { x: x(tick), y: floor + 18, "text-anchor": "middle" }, tickSeconds(tick, end)));
  }
  parts.push(s("path", { class: "between", d: area(points, end, x, y) }));
  parts.push(s("path", { class: "bound", d: steps(points, "bound", end, x, y) }));
  parts.push(s("path", { class: "incumbent", d: steps(points, "incumbent", end, x, y) }));
  const quantity = stage.phase === "peak" ? "peak" : "extra time";
  const isBounded = points.some((point) => point.bound !== null);
  parts.push(...legend(`best so far (${quantity})`, isBounded ? "proved bound" : null));
  const label = `The ${quantity} of the best schedule and its proved bound, over ${seconds(end)}`;
  return s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label }, parts);
}

function limits(values, phase, flat) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  // Do not magnify a spread that is negligible or due to rounding.
  const spread = Math.max(high - low, Math.abs(high) * 0.02, phase === "peak" ? 64 : 1e-4);
  if (flat || low < 1.5 * spread) low = 0;
  else low -= 0.1 * spread;
  return [low, high + 0.1 * spread];
}

/** Return about `count` round numbers from `low` to `high`. */
function ticks(low, high, count = 4) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((size) => size >= rough * 0.999);
  const numbers = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) numbers.push(n * step);
  return numbers;
}

function tickPercent(value, spread) {
  return percent(value, spread >= 0.05 ? 0 : spread >= 0.005 ? 1 : spread >= 0.0005 ? 2 : 3);
}

const tickSeconds = (time, end) =>
  end < 1 ? `${Number((time * 1000).toPrecision(3))} ms` : `${Number(time.toPrecision(3))} s`;

/** Return the path of a staircase: each value holds until the next one. */
function steps(points, name, end, x, y) {
  const values = points.filter((point) => point[name] !== null);
  if (!values.length) return "";
  const data = values.map((p, i) => (i ? `H${at(x(p.elapsed_s))}V${at(y(p[name]))}` : start(p, name, x, y)));
  return `${data.join("")}H${at(x(end))}`;
}

const start = (point, name, x, y) => `M${at(x(point.elapsed_s))} ${at(y(point[name]))}`;

const at = (value) => value.toFixed(1);

/** Return the path of the area between the two staircases, where both have values. */
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
