/** The view of one job: its state, its search while it runs, and its result. */

import { json, now } from "./api.js";
import { History, amount, chart, isFlat } from "./chart.js";
import { byId, h, announce, setText, showMessage } from "./dom.js";
import { end, endingName, isEnded } from "./ending.js";
import { watch } from "./events.js";
import { PHASE, age, bytes, gap, moment, seconds, sentence, title } from "./format.js";
import { status } from "./queue.js";
import { showResult } from "./result.js";

/** Show a job until `signal` aborts. `retry(bytes)` opens the form with another budget. */
export async function showJob(id, retry, signal) {
  const view = byId("job");
  view.replaceChildren(h("p", { class: "hint" }, "Loading the job …"));
  let page;
  try {
    const job = await json(`/jobs/${id}`, { signal, ask: true });
    page = new Page(view, job, retry, signal);
  } catch (error) {
    if (signal.aborted) return;
    document.title = "remat";
    view.replaceChildren(
      back(),
      h("h1", { tabindex: -1 }, "This job cannot be shown"),
      h("p", { class: "problem", role: "alert" }, error.message),
    );
    view.querySelector("h1").focus();
    return;
  }
  await page.follow();
}

const back = () => h("p", { class: "back" }, h("a", { href: "#/" }, "All jobs"));

class Page {
  constructor(view, job, retry, signal) {
    Object.assign(this, { view, job, retry, signal, history: new History(), drawTimer: 0, lastEventAt: 0, isComplete: false });
    this.state = h("p", { class: "state" });
    this.network = h("p", { class: "problem", hidden: true });
    this.button = h("button", { type: "button", click: () => this.end() });
    this.figures = h("dl", { class: "figures" });
    this.picture = h("div", { class: "scroll" });
    this.search = h(
      "section",
      { "aria-labelledby": "search-title", hidden: true },
      h("h2", { id: "search-title" }, "Search"),
      this.figures,
      this.picture,
    );
    this.result = h("div");
    const heading = h("h1", { tabindex: -1 }, title(job));
    const full = job.model && job.model !== title(job) ? `${job.model}; ` : "";
    const facts = `${full}${job.kind}, submitted ${moment(job.created_at)}, job `;
    view.replaceChildren(
      back(),
      heading,
      h("p", { class: "hint facts" }, facts, h("code", {}, job.id)),
      h("div", { class: "bar" }, this.state, this.button),
      this.network,
      this.result,
      this.search,
    );
    heading.focus();
  }

  async follow() {
    this.show();
    if (isEnded(this.job)) this.showResult();
    const clock = setInterval(() => this.tick(), 1000);
    this.signal.addEventListener("abort", () => clearInterval(clock), { once: true });
    try {
      await watch(
        this.job.id,
        (kind, data) => this.onEvent(kind, data),
        (isBroken) => this.showBroken(isBroken),
        this.signal,
      );
    } catch (error) {
      showMessage(this.network, error.message);
    }
    clearInterval(clock);
    if (this.signal.aborted) return;
    clearTimeout(this.drawTimer);
    if (!this.isComplete) {
      await this.refresh();
      this.showResult();
      announce(`${title(this.job)}: ${status(this.job)}`);
    }
    this.draw();
  }

  /** Update once a second: a queued job moves up without an event, and a running one takes longer. */
  tick() {
    if (this.job.status === "queued" || !this.job.started_at) this.refresh();
    else this.draw();
  }

  showBroken(isBroken) {
    showMessage(this.network, isBroken ? "The connection was lost; reconnecting." : "");
  }

  onEvent(kind, data) {
    if (kind === "status") {
      // The events of an ended job start with its past states.
      if (!isEnded(this.job) && !isEnded(data)) this.job = { ...this.job, status: data.status };
      this.show();
    } else if (kind === "progress" || kind === "incumbent") {
      this.history.add(data);
      this.lastEventAt = performance.now();
      if (!this.drawTimer) this.drawTimer = setTimeout(() => this.draw(), 100);
    }
  }

  async refresh() {
    try {
      this.job = await json(`/jobs/${this.job.id}`, { signal: this.signal });
      this.show();
    } catch (error) {
      if (!this.signal.aborted) showMessage(this.network, error.message);
    }
  }

  show() {
    const { job } = this;
    document.title = `${title(job)}: ${job.status} - remat`;
    setText(this.state, sentence(status(job) + this.since()));
    this.state.className = `state status ${job.status}`;
    setText(this.button, endingName(job));
  }

  since() {
    const { job } = this;
    if (!job.started_at || job.status === "queued") return "";
    if (isEnded(job)) {
      return `${job.status === "succeeded" ? " in" : ", after"} ${seconds(job.finished_at - job.started_at)}`;
    }
    const last = this.history.latest;
    const within = job.kind !== "solve" && last?.budget ? ` at ${bytes(last.budget)}` : "";
    const doing = last ? `: ${last.title || (PHASE[last.phase] ?? last.phase)}${within}` : "";
    return ` for ${age(now() - job.started_at)}${doing}`;
  }

  /** Return the seconds of the latest stage. A solver may send no events for a long time. */
  elapsed(stage) {
    const reported = stage.points.at(-1).elapsed_s;
    if (this.job.status !== "running") return reported;
    const isFirst = this.history.stages.length === 1 && this.job.started_at;
    const sinceEvent = (performance.now() - this.lastEventAt) / 1000;
    return Math.max(reported, isFirst ? now() - this.job.started_at : reported + sinceEvent);
  }

  /** Draw the search from the events so far. */
  draw() {
    this.drawTimer = 0;
    const stage = this.history.latest;
    this.show();
    if (!stage || this.signal.aborted) return;
    const end = this.elapsed(stage);
    const picture = this.isComplete && isFlat(stage) ? null : chart(stage, end);
    this.picture.replaceChildren(...(picture ? [picture] : []));
    const hasFigures = stage.phase !== "stage";
    this.search.hidden = (this.isComplete || !hasFigures) && !picture;
    this.figures.hidden = this.isComplete || !hasFigures; // the result shows them
    const last = stage.points.at(-1);
    const best = stage.phase === "peak" ? "Smallest peak so far" : "Best extra time so far";
    const formatted = (value) => (value === null ? "unknown" : amount(stage.phase, value));
    const stageCount = this.history.stages.length;
    const entries = [
      [best, formatted(last.incumbent)],
      ["Proved bound", formatted(last.bound)],
      ["Gap", gap(last.gap)],
      [stageCount > 1 ? `Time of stage ${stageCount}` : "Time", seconds(end)],
    ];
    this.figures.replaceChildren(
      ...entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    );
  }

  showResult() {
    const { job } = this;
    this.isComplete = isEnded(job);
    if (job.status === "succeeded") {
      showResult(job, this.result, this.signal);
    } else if (job.status === "infeasible") {
      this.result.replaceChildren(infeasible(job, this.retry));
    } else if (job.problem) {
      const name = h("strong", {}, job.problem.title || "The job failed");
      this.result.replaceChildren(h("p", { class: "problem" }, name, ": ", sentence(job.problem.detail)));
    }
  }

  async end() {
    const wasEnded = isEnded(this.job);
    try {
      if (!(await end(this.job))) return;
      if (wasEnded) location.hash = "#/";
      else await this.refresh();
    } catch (error) {
      showMessage(this.network, error.message);
    }
  }
}

function infeasible(job, retry) {
  const minimum = job.problem?.min_feasible_bytes ?? null;
  const parts = [h("h2", {}, "No schedule fits this budget"), h("p", {}, sentence(job.problem?.detail ?? ""))];
  if (minimum !== null) {
    parts.push(
      h("dl", { class: "figures" }, h("div", {}, h("dt", {}, "Smallest feasible budget found"),
        h("dd", {}, bytes(minimum)), h("dd", { class: "more" }, `${minimum.toLocaleString("en")} bytes`))),
      h("p", { class: "buttons" },
        h("button", { type: "button", class: "main", click: () => retry(minimum) }, `Retry with ${bytes(minimum)}`)),
    );
  }
  return h("section", { class: "infeasible" }, parts);
}
