/** One job: how it stands, its search while it runs, and its result. */

import { json, now } from "./api.js";
import { History, amount, chart, isFlat } from "./chart.js";
import { byId, h, say, setText, tell } from "./dom.js";
import { end, endingName, isEnded } from "./ending.js";
import { watch } from "./events.js";
import { PHASE, age, bytes, gap, moment, seconds, sentence, title } from "./format.js";
import { status } from "./queue.js";
import { resultOf } from "./result.js";

/** Show a job until `signal` aborts. `retry(bytes)` goes to the form with another budget. */
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
    Object.assign(this, { view, job, retry, signal, history: new History(), due: 0, heardAt: 0, isComplete: false });
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
    const facts = `${full}${job.kind}, asked ${moment(job.created_at)}, job `;
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
        (kind, data) => this.hear(kind, data),
        (isBroken) => this.tellBroken(isBroken),
        this.signal,
      );
    } catch (error) {
      tell(this.network, error.message);
    }
    clearInterval(clock);
    if (this.signal.aborted) return;
    clearTimeout(this.due);
    if (!this.isComplete) {
      await this.refresh();
      this.showResult();
      say(`${title(this.job)}: ${status(this.job)}`);
    }
    this.draw();
  }

  /** A queued job moves up without an event; of a running one, time goes on. */
  tick() {
    if (this.job.status === "queued" || !this.job.started_at) this.refresh();
    else this.draw();
  }

  tellBroken(isBroken) {
    tell(this.network, isBroken ? "The connection is interrupted; trying again." : "");
  }

  hear(kind, data) {
    if (kind === "status") {
      // Of an ended job, past states come by again.
      if (!isEnded(this.job) && !isEnded(data)) this.job = { ...this.job, status: data.status };
      this.show();
    } else if (kind === "progress" || kind === "incumbent") {
      this.history.add(data);
      this.heardAt = performance.now();
      if (!this.due) this.due = setTimeout(() => this.draw(), 100);
    }
  }

  async refresh() {
    try {
      this.job = await json(`/jobs/${this.job.id}`, { signal: this.signal });
      this.show();
    } catch (error) {
      if (!this.signal.aborted) tell(this.network, error.message);
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
    const within = job.kind === "sweep" && last?.budget ? ` at ${bytes(last.budget)}` : "";
    const doing = last ? `: ${PHASE[last.phase] ?? last.phase}${within}` : "";
    return ` for ${age(now() - job.started_at)}${doing}`;
  }

  /** How long the latest stage has gone on: a solver may be silent for long. */
  elapsed(stretch) {
    const told = stretch.points.at(-1).elapsed_s;
    if (this.job.status !== "running") return told;
    const isFirst = this.history.stretches.length === 1 && this.job.started_at;
    const silent = (performance.now() - this.heardAt) / 1000;
    return Math.max(told, isFirst ? now() - this.job.started_at : told + silent);
  }

  /** The search, as far as events told of it. */
  draw() {
    this.due = 0;
    const stretch = this.history.latest;
    this.show();
    if (!stretch || this.signal.aborted) return;
    const end = this.elapsed(stretch);
    const drawn = this.isComplete && isFlat(stretch) ? null : chart(stretch, end);
    this.picture.replaceChildren(...(drawn ? [drawn] : []));
    this.search.hidden = this.isComplete && !drawn;
    this.figures.hidden = this.isComplete; // the result says it better
    const last = stretch.points.at(-1);
    const best = stretch.phase === "peak" ? "Smallest peak so far" : "Best extra time so far";
    const known = (value) => (value === null ? "unknown" : amount(stretch.phase, value));
    const stages = this.history.stretches.length;
    const entries = [
      [best, known(last.incumbent)],
      ["Proved bound", known(last.bound)],
      ["Gap", gap(last.gap)],
      [stages > 1 ? `Time of stage ${stages}` : "Time", seconds(end)],
    ];
    this.figures.replaceChildren(
      ...entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    );
  }

  showResult() {
    const { job } = this;
    this.isComplete = isEnded(job);
    if (job.status === "succeeded") {
      resultOf(job, this.result, this.signal);
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
      tell(this.network, error.message);
    }
  }
}

function infeasible(job, retry) {
  const least = job.problem?.min_feasible_bytes ?? null;
  const parts = [h("h2", {}, "No schedule fits this budget"), h("p", {}, sentence(job.problem?.detail ?? ""))];
  if (least !== null) {
    parts.push(
      h("dl", { class: "figures" }, h("div", {}, h("dt", {}, "Smallest feasible budget found"),
        h("dd", {}, bytes(least)), h("dd", { class: "more" }, `${least.toLocaleString("en")} bytes`))),
      h("p", { class: "buttons" },
        h("button", { type: "button", class: "main", click: () => retry(least) }, `Ask again with ${bytes(least)}`)),
    );
  }
  return h("section", { class: "infeasible" }, parts);
}
