// A run's page: header, panels and orders, updated by server-sent events.

import { onPick, onZoom, zoomTo } from "./charts.js";
import { ask } from "./dialog.js";
import { api, button, compact, el, figure, notify, ranked, runPath, setText, whole } from "./dom.js";
import { explain } from "./explain.js";
import { drawTiles, makePanel } from "./panels.js";

const ALWAYS = ["time/env_steps", "policy/version", "rollout/ep_rew_mean", "time/fps", "league/rating/*"].map((name) => ["train", name]);
const SERIES_MILLISECONDS = 3000;
const RATINGS = "league/rating/";
const GROUPS = ["Learning", "Throughput", "Fleet", "Records"];

export class RunPage {
  constructor(runId, specs, canOrder) {
    Object.assign(this, { runId, snapshot: null, series: { train: {}, fleet: {} }, config: null });
    this.canOrder = canOrder;
    this.axis = new URLSearchParams(location.search).get("x") === "time" ? "time" : "steps";
    this.visible = new Set();
    this.complete = false;
    this.seriesAt = -Infinity;
    this.panels = specs.map((spec) => makePanel(spec, this));
    this.watch = new IntersectionObserver((seen) => this.scrolled(seen), { rootMargin: "300px" });
    this.draw();
    onPick((x, axis) => explain(this.runId, this.versionAt(x, axis)));
    onZoom((range) => (this.resetZoom.hidden = range === null));
    const kept = (data) => (this.config = data.config);
    this.readConfig().then(kept, () => {}).then(() => this.update());
  }

  draw() {
    this.state = el("span", { class: "state" });
    this.reason = el("p", { class: "reason" });
    this.tiles = el("dl", { class: "tiles summary" });
    this.resetZoom = button({ class: "quiet", hidden: true, onclick: () => zoomTo(null) }, "Reset zoom");
    const checkpoint = button({ onclick: () => this.order("checkpoint") }, "Checkpoint");
    this.promoteOrder = button({ onclick: () => this.promote() }, "Promote …");
    const others = [
      button({ onclick: () => this.scale() }, "Scale …"),
      button({ onclick: () => this.note() }, "Note …"),
      button({ class: "danger", onclick: () => this.stop() }, "Stop …"),
    ];
    this.orders = [checkpoint, ...others];
    const group = { class: "orders", role: "group", "aria-label": "Actions on the run" };
    const why = button({ onclick: () => explain(this.runId, this.snapshot?.state.version) }, "Explain …");
    const orders = el("div", group, why, checkpoint, this.promoteOrder, ...others);
    const head = el("div", { class: "head" }, el("h1", {}, this.runId), this.state, orders);
    const groups = GROUPS.map((name) => {
      const own = this.panels.filter((panel) => panel.spec.group === name).map((panel) => panel.root);
      const title = el("h2", { id: name.toLowerCase() }, name);
      return el("section", { class: "group", "aria-label": name }, title, el("div", { class: "panels" }, ...own));
    });
    this.root = el("div", { class: "run" }, head, this.reason, this.tiles, ...groups);
    this.tools = el("span", {}, this.resetZoom, this.axisSwitch());
    for (const panel of this.panels) this.watch.observe(panel.root);
  }

  axisSwitch() {
    const choice = (axis, label) => {
      const choose = () => {
        this.axis = axis;
        history.replaceState(null, "", axis === "time" ? "?x=time" : location.pathname);
        for (const child of group.children) child.setAttribute("aria-pressed", String(child === made));
        zoomTo(null);
        this.update();
      };
      const made = button({ "aria-pressed": String(this.axis === axis), onclick: choose }, label);
      return made;
    };
    const attributes = { class: "switch", role: "group", "aria-label": "Horizontal axis" };
    const group = el("span", attributes, choice("steps", "Env steps"), choice("time", "Time"));
    return group;
  }

  close() {
    this.closed = true;
    onPick(null);
    this.watch.disconnect();
    clearTimeout(this.timer);
    for (const panel of this.panels) panel.close();
    zoomTo(null);
  }

  scrolled(seen) {
    for (const { target, isIntersecting } of seen) {
      const panel = this.panels.find(({ root }) => root === target);
      if (isIntersecting) this.visible.add(panel);
      else this.visible.delete(panel);
    }
    this.update();
    if (this.missing().length) this.readSeries();
  }

  take(snapshot) {
    const first = this.snapshot === null;
    this.snapshot = snapshot;
    this.drawHead();
    this.update();
    if (first) this.readSeries();
  }

  update() {
    if (this.snapshot === null) return;
    for (const panel of this.panels) panel.root.hidden = !panel.fits(this);
    for (const panel of this.visible) panel.update(this);
  }

  /** Returns whether the run has rows of a metric, or of any metric with this prefix. */
  has(name) {
    return matching(name, this.snapshot.metrics.train || []).length > 0;
  }

  /** Ids of the policies, if there are several. */
  policies() {
    const prefix = "time/transitions/";
    return matching(`${prefix}*`, this.snapshot.metrics.train || []).map((name) => name.slice(prefix.length));
  }

  drawHead() {
    const { state } = this.snapshot;
    document.title = `${this.runId} · ${state.state} · ${compact(state.env_steps)} steps`;
    setText(this.state, state.state);
    this.state.dataset.state = state.state;
    setText(this.reason, state.live ? `Waiting for ${state.bottleneck}` : this.snapshot.reason);
    for (const button of this.orders) button.disabled = !this.canOrder || !state.live;
    this.promoteOrder.disabled = !this.canOrder || !this.snapshot.checkpoints?.length;
    const { evaluation: evaluated, best_evaluation: best } = state;
    const newest = state.metrics || {};
    const last = (name) => newest[name] ?? this.series.train[name]?.mean.at(-1);
    const rated = Object.keys(this.series.train).filter((name) => name.startsWith(RATINGS));
    const scores = rated.length
      ? rated.sort().slice(0, 3).map((name) => [`rating of ${name.slice(RATINGS.length)}`, figure(last(name)), "training"])
      : [
          ["training return", figure(last("rollout/ep_rew_mean")), "last episodes"],
          ["last evaluation", figure(evaluated?.mean_return), evaluated && `at ${compact(evaluated.env_steps)} steps`],
          ["best", ranked(best?.ranking ?? best?.mean_return, best?.ranked_by), best && "second evaluation"],
        ];
    drawTiles(this.tiles, [
      ...scores,
      ["env steps", whole(state.env_steps)],
      ["speed", `${compact(last("time/fps"))} /s`, "env steps"],
      ["episodes", whole(state.episodes)],
      ["updates", whole(state.updates)],
      ["policy version", whole(state.version)],
    ]);
  }

  /** Available metrics of the visible panels, by stream. */
  wanted(panels = this.visible) {
    const wanted = { train: new Set(), fleet: new Set() };
    for (const [stream, name] of [...ALWAYS, ...[...panels].flatMap((panel) => panel.wants)]) {
      const there = this.snapshot?.metrics[stream] || [];
      for (const each of matching(name, there)) wanted[stream].add(each);
    }
    return wanted;
  }

  missing() {
    const lacking = ([stream, names]) => [...names].filter((name) => !this.series[stream][name]);
    return Object.entries(this.wanted()).flatMap(lacking);
  }

  /** Refetches curves at most every three seconds, less often if that is slow; missing curves immediately. */
  readSeries() {
    clearTimeout(this.timer);
    if (this.closed) return;
    const pause = Math.max(SERIES_MILLISECONDS, 5 * (this.took || 0));
    const due = this.missing().length ? 0 : this.seriesAt + pause - performance.now();
    this.timer = setTimeout(() => this.readNow(), Math.max(due, 0));
  }

  async readNow() {
    if (this.reading) {
      this.again = true;
      return;
    }
    this.reading = true;
    const begun = performance.now();
    try {
      await this.readOf(this.visible);
      if (!this.complete) await this.readOf(this.panels); // hidden panels once, so that they have data when they scroll into view
      this.complete = true;
    } catch (error) {
      if (error.status) notify(`curves: ${error.message}`, true);
    }
    this.seriesAt = performance.now();
    this.took = this.seriesAt - begun;
    this.reading = false;
    if (this.again) this.readSeries();
    this.again = false;
  }

  async readOf(panels) {
    for (const [stream, names] of Object.entries(this.wanted(panels))) {
      if (!names.size) continue;
      const query = new URLSearchParams([["stream", stream], ...[...names].map((name) => ["metric", name])]);
      Object.assign(this.series[stream], await api(`${runPath(this.runId)}/series?${query}`));
    }
    for (const panel of panels) panel.update(this);
    this.drawHead();
  }

  readConfig(against = "") {
    return api(`${runPath(this.runId)}/config${against ? `?against=${encodeURIComponent(against)}` : ""}`);
  }

  /** A number of the status (`flow.max_policy_lag`); for an ended run, of the config. */
  bound(path) {
    const found = path.split(".").reduce((data, name) => data?.[name], this.snapshot.state);
    return found ?? this.config?.[CONFIGURED[path]];
  }

  /** Policy version at a place of the horizontal axis; that of the newest row behind all. */
  versionAt(x, axis) {
    const { mean: versions = [], ...places } = this.series.train["policy/version"] || {};
    const at = (places[axis === "time" ? "unix_seconds" : "env_steps"] || []).findIndex((place) => place >= x);
    return Math.max(1, Math.round(versions.at(at) ?? 1));
  }

  /** Env steps trained by a time, interpolated between rows; null without rows. */
  stepsAt(unixSeconds) {
    const { unix_seconds: times = [], env_steps: steps } = this.series.train["time/env_steps"] || {};
    if (!times.length) return null;
    const next = times.findIndex((time) => time >= unixSeconds);
    if (next < 0) return steps.at(-1);
    if (next === 0) return steps[0];
    const share = (unixSeconds - times[next - 1]) / (times[next] - times[next - 1]);
    return steps[next - 1] + share * (steps[next] - steps[next - 1]);
  }

  // Orders

  async order(verb, body = {}) {
    try {
      notify((await api(`${runPath(this.runId)}/${verb}`, body)).done);
    } catch (error) {
      notify(error.message, true);
    }
  }

  async stop() {
    const text = `${this.runId} will write a final checkpoint and end. It can be resumed.`;
    if (await ask("Stop the run?", [], { text, yes: "Stop", danger: true })) await this.order("stop");
  }

  async note() {
    const field = { name: "text", label: "Text for the run's events", required: true };
    const found = await ask("Add a note", [field], { yes: "Add" });
    if (found) await this.order("note", { text: found.text });
  }

  async promote(name) {
    const names = (this.snapshot.checkpoints || []).map((entry) => entry.name).reverse();
    const field = { name: "checkpoint", label: "Checkpoint", options: names, value: this.snapshot.state.best };
    const text = `${name || "The checkpoint"} will be marked for deployment: it is never pruned, and load_policy prefers it.`;
    const found = await ask("Promote a checkpoint", name ? [] : [field], { text, yes: "Promote" });
    if (found) await this.order("promote", { checkpoint: name || found.checkpoint });
  }

  async scale() {
    const { desired_workers: wanted, scaling } = this.snapshot.state;
    const options = ["fixed number", "automatic"];
    const fields = [
      { name: "mode", label: "Workers", options, value: options[Number(scaling.mode === "auto")] },
      { name: "workers", label: "Number of workers, if fixed", type: "number", value: wanted },
      { name: "min", label: "Minimum, if automatic", type: "number", value: scaling.min },
      { name: "max", label: "Maximum, if automatic", type: "number", value: scaling.max },
    ];
    const found = await ask("Scale the fleet", fields, { yes: "Scale" });
    if (!found) return;
    const given = ["min", "max"].filter((name) => found[name]).map((name) => [name, Number(found[name])]);
    const automatic = { auto: true, ...Object.fromEntries(given) };
    await this.order("scale", found.mode === "automatic" ? automatic : { workers: Number(found.workers) });
  }
}

/** Returns the metrics with this name, or with this prefix if it ends in `*`. */
const matching = (name, there) =>
  there.filter((each) => (name.endsWith("*") ? each.startsWith(name.slice(0, -1)) : each === name));

const CONFIGURED = { "flow.max_policy_lag": "rollout.max_policy_lag", "log.max_bytes": "rollout.max_log_bytes" };
