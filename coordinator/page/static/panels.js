// Panels of a run's page, built from /api/panels; `update(run)` redraws a panel.

import { Chart } from "./charts.js";
import {
  api, button, bytes, clock, compact, el, figure, percent, prose, ranked, runPath, seconds, setText, svg, whole,
} from "./dom.js";
import { PagedTable } from "./tables.js";

const FORMATS = { bytes, share: percent };
const COUNTED = ["workers", "fragments", "versions"];
const HUES = 8;
const WORK = [1, 6, 3, 8];
const WAITS = [2, 5, 4, 7];

/** A frame with title, note and body; `wants` lists the metrics to fetch, as [stream, name or name*]. */
class Panel {
  constructor(spec) {
    this.spec = spec;
    this.title = el("h3", { id: `title-${spec.id}` }, spec.title);
    this.tools = el("div", { class: "tools" });
    this.note = el("p", { class: "note", hidden: !spec.note }, ...prose(spec.note));
    this.absent = el("p", { class: "absent", hidden: true }, ...prose(spec.absent));
    this.body = el("div", { class: "body" });
    const named = spec.unit && spec.unit !== "share" && spec.unit !== spec.title.toLowerCase();
    const head = el("header", {}, this.title, named ? el("span", { class: "unit" }, spec.unit) : null, this.tools);
    const attributes = { class: `panel kind-${spec.kind}`, id: `panel-${spec.id}`, "aria-labelledby": this.title.id };
    this.root = el("section", attributes, head, this.note, this.absent, this.body);
    this.wants = spec.lines.flatMap((line) =>
      [line.metric, ...this.parts(line), ...(line.band || [])].map((name) => [this.stream(line), name]),
    );
  }

  stream(line) {
    return line.stream || this.spec.stream;
  }

  /** Patterns of the same metric for each policy or agent. */
  parts(line) {
    return this.spec.group === "Learning" && !line.metric.endsWith("*") ? [`${line.metric}/*`] : [];
  }

  /** Returns whether the panel says anything about this run. */
  fits(run) {
    return !this.spec.needs || run.has(this.spec.needs);
  }

  update() {}

  close() {}

  /** Shows the body, or the reason for its absence. */
  showBody(there) {
    this.body.hidden = !there;
    this.absent.hidden = there;
    this.note.hidden = !there || !this.spec.note;
  }

  /** Lines in the format of `Chart.draw`; lines without rows are left out. */
  lines(run) {
    return this.spec.lines.flatMap((line) => this.each(line, run)).flatMap((line, index) => {
      const series = run.series[this.stream(line)]?.[line.metric];
      if (!series?.mean.length) return [];
      const [low, high] = (line.band || []).map((name) => run.series[this.stream(line)][name]);
      const names = ["10th percentile", "90th percentile"];
      const named = low && high && { ...low, low: low.mean, high: high.mean, names };
      const reduced = series.low.some((value, at) => value !== series.high[at]);
      const band = named || (reduced ? { ...series, names: ["minimum", "maximum"] } : null);
      return [{ label: line.label, of: line.of || line.label, hue: (index % HUES) + 1, series, band }];
    });
  }

  /** Expands a line: one for each policy too, or, if its metric ends in `*`, one for each metric with that prefix. */
  each(line, run) {
    if (line.metric.endsWith("*")) return this.below(line.metric.slice(0, -1), line, run);
    if (!this.parts(line).length) return [line];
    const policies = run.policies();
    return [line, ...this.below(`${line.metric}/`, line, run).filter(({ label }) => policies.includes(label))];
  }

  below(prefix, line, run) {
    const there = Object.keys(run.series[this.stream(line)] || {}).filter((name) => name.startsWith(prefix));
    const part = { ...line, of: line.label, band: null };
    return there.sort().map((metric) => ({ ...part, metric, label: metric.slice(prefix.length) }));
  }
}

/** A panel with one chart, or one for each line, and a table of the same data. */
class ChartPanel extends Panel {
  constructor(spec) {
    super(spec);
    this.format = FORMATS[spec.unit] || figure;
    this.charts = new Map();
    this.plots = el("div", { class: spec.kind === "multiples" ? "multiples" : "single" });
    this.tableHost = el("div", { hidden: true });
    const attributes = { class: "quiet", "aria-pressed": "false", "aria-label": `${spec.title} as a table` };
    this.button = button({ ...attributes, onclick: () => this.turn() }, "Table");
    this.tools.append(this.button);
    this.body.append(this.plots, this.tableHost);
  }

  turn() {
    const asTable = this.tableHost.hidden;
    this.tableHost.hidden = !asTable;
    this.plots.hidden = asTable;
    this.button.setAttribute("aria-pressed", String(asTable));
    setText(this.button, asTable ? "Chart" : "Table");
    if (this.run) this.update(this.run);
  }

  update(run) {
    this.run = run;
    const lines = this.lines(run);
    this.showBody(lines.length > 0);
    this.button.hidden = !lines.length;
    if (!lines.length) return;
    const bound = this.bound(run);
    if (this.spec.kind === "multiples")
      for (const title of new Set(lines.map(({ of }) => of))) {
        const own = lines.filter(({ of }) => of === title).map((line, index) => ({ ...line, hue: (index % HUES) + 1 }));
        this.chart(title, { legend: run.policies().length > 1 }).draw(own, run.axis);
      }
    else this.chart(this.spec.title, { stacked: this.spec.kind === "shares" }).draw(lines, run.axis, bound);
    if (!this.tableHost.hidden) this.drawTable(run);
  }

  bound(run) {
    const value = this.spec.bound && run.bound(this.spec.bound);
    return typeof value === "number" ? { value, label: `bound ${this.format(value)}` } : null;
  }

  chart(label, options) {
    if (!this.charts.has(label)) {
      const chart = new Chart({ label, format: this.format, wholeTicks: COUNTED.includes(this.spec.unit), ...options });
      const single = this.spec.kind !== "multiples";
      this.plots.append(single ? chart.root : el("figure", {}, el("figcaption", {}, label, chart.value), chart.root));
      this.charts.set(label, chart);
    }
    return this.charts.get(label);
  }

  drawTable(run) {
    const tables = [...this.charts.values()].map((chart) => chart.table());
    const heads = [...this.charts.values()].flatMap((chart, index) =>
      tables[index].heads.map((head) => (tables.length > 1 && head !== chart.label ? `${chart.label}: ${head}` : head)),
    );
    const axis = run.axis === "time" ? { label: "time", left: true, text: clock } : { label: "env steps", text: whole };
    const key = JSON.stringify([heads, run.axis]);
    if (key !== this.tableKey) {
      const values = heads.map((label, index) => ({ label, value: (row) => row[index + 1], text: this.format }));
      this.table = new PagedTable(this.spec.title, [{ ...axis, value: (row) => row[0] }, ...values]);
      this.tableHost.replaceChildren(this.table.root);
      this.tableKey = key;
    }
    this.table.set(tables.length === 1 ? tables[0].rows : mergedRows(tables));
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Merges the tables of several charts: a row for each x. */
function mergedRows(tables) {
  const found = new Map();
  let before = 0;
  const width = tables.reduce((sum, table) => sum + table.heads.length, 0);
  for (const { heads, rows } of tables) {
    for (const [x, ...values] of rows) {
      const row = found.get(x) || [x, ...new Array(width).fill(null)];
      values.forEach((value, index) => (row[1 + before + index] = value));
      found.set(x, row);
    }
    before += heads.length;
  }
  return [...found.values()].sort((one, other) => other[0] - one[0]);
}

class ReturnPanel extends ChartPanel {
  each(line, run) {
    const found = super.each(line, run);
    if (found.length > 1) return found;
    return [line, ...this.below(`${line.metric}/`, line, run).slice(0, HUES - 2)];
  }

  /** Shows the return of each side of a league; the sum over both sides, which evaluations also have, means nothing. */
  lines(run) {
    const trained = super.lines(run);
    const sides = trained.filter(({ label, of }) => label !== of);
    if (run.has("league/rating/*") && sides.length) {
      setText(this.note, "Training return of each side. Ratings and matches measure how good a player is.");
      return sides;
    }
    const x = run.axis === "time" ? "time/unix_seconds" : "time/env_steps"; // the newest have no time until they are recorded
    const rows = run.snapshot.evaluations
      .filter((row) => row["eval/ep_rew_mean"] !== undefined && row[x] !== undefined)
      .sort((one, other) => one["time/env_steps"] - other["time/env_steps"]);
    if (!rows.length) return trained;
    const column = (name) => rows.map((row) => row[name] ?? null);
    const axes = { env_steps: column("time/env_steps"), unix_seconds: column("time/unix_seconds") };
    const series = { ...axes, mean: column("eval/ep_rew_mean") };
    const at = rows.findIndex((row) => row.label === run.snapshot.state.best);
    const value = run.snapshot.state.best_evaluation?.mean_return;
    const place = { env_steps: axes.env_steps[at], unix_seconds: axes.unix_seconds[at] };
    const marked = at >= 0 && value !== undefined && { ...place, value };
    const hue = trained.length > 1 ? HUES : 2;
    return [...trained, { label: "evaluations", hue, series, dots: true, best: marked }];
  }
}

/** Stacks waits in warm colors below work in cool colors; small stages are merged. */
class SharesPanel extends ChartPanel {
  lines(run) {
    const stages = this.each(this.spec.lines[0], run).map(({ metric, label }) => {
      const series = run.series[this.spec.stream][metric];
      return { stage: label, series, weight: mean(series.mean) };
    });
    stages.sort((one, other) => (one.stage === "other") - (other.stage === "other") || other.weight - one.weight);
    const waits = stages.filter(({ stage }) => stage.startsWith("wait("));
    const work = stages.filter(({ stage }) => !stage.startsWith("wait("));
    return [...few(waits, WAITS, "other waits"), ...few(work, WORK, "other")];
  }
}

function few(stages, hues, rest) {
  const large = stages.filter(({ weight, stage }) => weight >= 0.01 && stage !== "other").length;
  const shown = large === stages.length && large <= hues.length ? large : Math.min(large, hues.length - 1);
  const lines = stages.slice(0, shown).map(({ stage, series }, index) => {
    const wait = /^wait\((.*)\)$/.exec(stage);
    return { label: wait ? `waits: ${wait[1]}` : stage, hue: hues[index], series };
  });
  if (shown < stages.length)
    lines.push({ label: rest, hue: hues.at(-1), series: sum(stages.slice(shown).map(({ series }) => series)) });
  return lines;
}

const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;

function sum(parts) {
  const rows = new Map();
  for (const part of parts) {
    part.unix_seconds.forEach((time, at) => {
      const row = rows.get(time) || { time, steps: part.env_steps[at], value: 0 };
      row.value += part.mean[at];
      rows.set(time, row);
    });
  }
  const sorted = [...rows.values()].sort((one, other) => one.time - other.time);
  const [steps, times, values] = ["steps", "time", "value"].map((name) => sorted.map((row) => row[name]));
  return { env_steps: steps, unix_seconds: times, mean: values };
}

class FleetPanel extends ChartPanel {
  constructor(spec) {
    super(spec);
    this.speeds = new Map();
    this.tiles = el("dl", { class: "tiles" });
    this.processes = new PagedTable(
      "Processes of the run",
      [
        { label: "process", left: true, value: (row) => row.name },
        { label: "env steps/s", value: (row) => row.speed, text: compact },
        { label: "heartbeat", value: (row) => row.beat.age_seconds, text: seconds },
        { label: "restarts", value: (row) => row.beat.progress.incarnation ?? null },
        { label: "version", value: (row) => row.beat.progress.version ?? null },
        { label: "activity", left: true, value: (row) => row.does },
        { label: "host", left: true, value: (row) => row.beat.host },
      ],
      { filter: "Find a process", empty: "The run is not live, so it has no processes." },
    );
    this.root.insertBefore(this.tiles, this.absent);
    this.root.append(this.processes.root);
  }

  update(run) {
    super.update(run);
    const row = (beat) => ({ beat, name: nameOf(beat), speed: this.speed(beat), does: doing(beat) });
    const rows = run.snapshot.state.roles.map(row);
    this.processes.set(rows);
    this.tiles.hidden = !rows.length;
    const workers = rows.filter(({ beat }) => beat.role === "worker" && beat.alive);
    const known = workers.filter(({ speed }) => speed !== null);
    const slowest = least(known, (row) => row.speed);
    const silent = least(workers, (row) => -row.beat.age_seconds);
    const restarts = workers.reduce((total, { beat }) => total + (beat.progress.incarnation || 0), 0);
    drawTiles(this.tiles, [
      ["workers alive", `${workers.length} of ${run.snapshot.state.desired_workers ?? "–"}`],
      ["mean of workers", known.length ? `${compact(mean(known.map((row) => row.speed)))} /s` : "–"],
      ["slowest worker", slowest ? `${compact(slowest.speed)} /s` : "–", slowest?.name],
      ["oldest heartbeat", silent ? seconds(silent.beat.age_seconds) : "–", silent?.name],
      ["restarts", String(restarts)],
    ]);
  }

  /** Env steps per second of one process, smoothed over recent heartbeats. */
  speed(beat) {
    const done = beat.progress.transitions;
    if (done === undefined) return null;
    const [key, at] = [`${beat.role}:${beat.id}:${beat.process}`, Number(beat.stamp)];
    const before = this.speeds.get(key) || { at, done, speed: null };
    const passed = at - before.at;
    if (passed <= 0.5) {
      this.speeds.set(key, before);
      return before.speed;
    }
    const now = (done - before.done) / passed;
    const speed = before.speed === null ? now : 0.7 * before.speed + 0.3 * now;
    this.speeds.set(key, { at, done, speed });
    return speed;
  }
}

const nameOf = (beat) => (beat.id.startsWith(beat.role) || !beat.id ? beat.id || beat.role : `${beat.role} ${beat.id}`);

function least(rows, value) {
  return rows.reduce((found, row) => (found === null || value(row) < value(found) ? row : found), null);
}

function doing(beat) {
  if (beat.ended) return `ended: ${beat.ended}`;
  if (!beat.alive) return "silent";
  const wait = beat.waiting_for && `waits for ${beat.waiting_for}, ${seconds(beat.waiting_seconds)}`;
  const does = wait || beat.progress.phase || "working";
  return beat.last_error ? `${does}: ${beat.last_error}` : does;
}

/** Pairs of name and value. */
export function drawTiles(host, tiles) {
  while (host.children.length < tiles.length) host.append(el("div", {}, el("dt"), el("dd"), el("small")));
  while (host.children.length > tiles.length) host.lastChild.remove();
  tiles.forEach(([name, value, of = ""], index) => {
    const [term, data, small] = host.children[index].children;
    setText(term, name);
    setText(data, value);
    setText(small, of || "");
  });
}

class AutoscalerPanel extends ChartPanel {
  constructor(spec) {
    super(spec);
    this.mode = el("p", { class: "mode" });
    this.why = el("ol", { class: "why" });
    this.root.append(this.mode, this.why);
  }

  update(run) {
    super.update(run);
    const { scaling, desired_workers: wanted } = run.snapshot.state;
    setText(this.mode, scaling.mode ? scalingInWords(scaling, wanted) : "The run is not live, so it cannot be scaled.");
    const steps = run.snapshot.events.filter(({ kind }) => kind === "scaling").slice(-5).reverse();
    const lines = steps.map(({ time, text }) => el("li", {}, el("time", {}, clock(time)), text));
    this.why.replaceChildren(...(lines.length ? lines : [el("li", {}, "The fleet has not been scaled.")]));
  }
}

function scalingInWords({ mode, min, max, capacity }, wanted) {
  const limit = capacity ? ` The cluster has capacity for ${capacity.now}.` : "";
  if (mode !== "auto") return `Fixed at ${wanted}.${limit}`;
  return `Automatically between ${min} and ${max ?? "the cluster's capacity"}; ${wanted} now.${limit}`;
}

const LANES = [
  ["checkpoints", ["checkpoint"], 3],
  ["evaluations", ["evaluation"], 2],
  ["processes", ["trainer", "worker", "rank", "evaluator", "environment", "coordinator", "dropped"], 4],
  ["services", ["service", "store", "outage", "metrics"], 5],
  ["scaling", ["scaling"], 1],
  ["state and promotion", ["state", "promotion"], 6],
  ["league", ["league"], 7],
  ["notes", ["note"], 8],
];

class TimelinePanel extends Panel {
  constructor(spec, run) {
    super(spec);
    this.wants = [["train", "time/env_steps"]];
    this.lanes = el("div", { class: "lanes" });
    const score = (label, scores) => ({
      label,
      value: (row) => scores(row)?.ranking ?? scores(row)?.mean_return ?? null,
      text: (value, row) => ranked(value, scores(row)?.ranked_by),
    });
    const marked = (row) => `${row.name} ${row.marks}`;
    const marks = (row) => el("span", {}, ...row.marks.map((mark) => el("span", { class: `mark ${mark}` }, mark)));
    this.checkpoints = new PagedTable(
      "Kept checkpoints",
      [
        { label: "checkpoint", left: true, value: (row) => row.name },
        score("evaluation", (row) => row.evaluation),
        score("second evaluation", (row) => row.evaluation?.confirmation),
        { label: "size", value: (row) => row.bytes, text: bytes },
        { label: "created", value: (row) => row.created, text: clock },
        { label: "marks", left: true, value: marked, node: marks },
        { label: "", value: marked, node: (row) => promoteButton(row, run) },
      ],
      { empty: "No checkpoint yet; the first one is written when training starts.", sortBy: 4, descending: true },
    );
    this.events = new PagedTable(
      "Events",
      [
        { label: "time", left: true, value: (row) => row.time, text: clock },
        { label: "kind", left: true, value: (row) => row.kind },
        { label: "details", left: true, wrap: true, value: (row) => row.text },
      ],
      { filter: "Find an event", empty: "No events yet." },
    );
    const kept = el("div", {}, el("h4", {}, "Kept checkpoints"), this.checkpoints.root);
    const events = el("div", {}, el("h4", {}, "Events"), this.events.root);
    this.body.append(this.lanes, el("div", { class: "halves" }, kept, events));
  }

  update(run) {
    const { events, checkpoints } = run.snapshot;
    this.checkpoints.set(checkpoints || []);
    this.events.set(events.toReversed());
    this.lanes.replaceChildren(...drawLanes(run, events));
  }
}

function promoteButton(row, run) {
  const promoted = row.marks.includes("promoted");
  const attributes = { class: "quiet", disabled: promoted || !run.canOrder, "aria-label": `Promote ${row.name}` };
  return button({ ...attributes, onclick: () => run.promote(row.name) }, promoted ? "promoted" : "Promote");
}

/** A row of marks for each kind of event, over the x axis of the charts. */
function drawLanes(run, events) {
  const placed = events.map((event) => ({ ...event, x: run.axis === "time" ? event.time : run.stepsAt(event.time) }));
  const known = placed.filter(({ x }) => x !== null);
  const why = events.length ? "The env steps of these events are not recorded yet." : "No events yet.";
  if (!known.length) return [el("p", { class: "absent" }, why)];
  const xs = known.map(({ x }) => x);
  const [first, last] = [Math.min(...xs, run.axis === "time" ? Infinity : 0), Math.max(...xs)];
  const percentOf = (x) => 1 + (98 * (x - first)) / (last - first || 1);
  const lanes = LANES.flatMap(([name, kinds, hue]) => {
    const found = known.filter(({ kind }) => kinds.includes(kind));
    if (!found.length) return [];
    const marks = found.map(({ x, time, text }) => {
      const mark = svg("circle", { cx: `${percentOf(x)}%`, cy: "50%", r: 4.5 }, svg("title"));
      mark.firstChild.textContent = `${clock(time)}: ${text}`;
      return mark;
    });
    const attributes = { role: "img", "aria-label": `${name}: ${found.length}`, class: `hue-${hue}` };
    const drawing = svg("svg", attributes, svg("line", { x1: "0", x2: "100%", y1: "50%", y2: "50%" }), ...marks);
    const count = el("span", { class: "count" }, whole(found.length));
    return [el("div", { class: "lane" }, el("span", {}, name), drawing, count)];
  });
  const say = run.axis === "time" ? clock : (steps) => `${compact(steps)} steps`;
  const ends = el("div", {}, el("span", {}, say(first)), el("span", {}, say(last)));
  return [...lanes, el("div", { class: "lane ends" }, el("span"), ends, el("span"))];
}

class LedgerPanel extends Panel {
  constructor(spec) {
    super(spec);
    this.sentence = el("p", { class: "sentence" });
    const part = (name) => ({ label: name.replace("_", " "), value: (row) => transitions(row[name]), text: whole });
    this.table = new PagedTable("Ledger by worker, in env steps", [
      { label: "worker", left: true, value: (row) => row.name },
      part("produced"),
      part("consumed"),
      part("dropped"),
      part("in_flight"),
      { label: "balances", value: (row) => (row.balances ? "✓" : "✗") },
    ]);
    this.body.append(this.sentence, this.table.root);
  }

  update(run) {
    const rows = Object.entries(run.snapshot.state.ledger).map(([name, line]) => ({ name, ...line }));
    this.showBody(rows.length > 0);
    const total = rows.find(({ name }) => name === "total");
    if (!total) return;
    const part = (name) => `${whole(transitions(total[name]))} ${name.replace("_", " ")}`;
    const parts = ["consumed", "dropped", "in_flight"].map(part).join(" + ");
    const verdict = total.balances ? "balances" : "DOES NOT BALANCE";
    setText(this.sentence, `${whole(transitions(total.produced))} env steps produced = ${parts}: ${verdict}`);
    this.sentence.classList.toggle("bad", !total.balances);
    this.table.set(rows);
  }
}

/** Transitions of a ledger entry; drops are counted by reason. */
function transitions(entry) {
  if (!entry) return 0;
  if (typeof entry.transitions === "number") return entry.transitions;
  return Object.values(entry).reduce((total, one) => total + (one?.transitions ?? 0), 0);
}

class ConfigPanel extends Panel {
  constructor(spec, run) {
    super(spec);
    const events = { onchange: () => this.compare(run), onfocus: () => this.offer(run) };
    const none = el("option", { value: "" }, "Compare with …");
    this.other = el("select", { "aria-label": "Compare with another run", ...events }, none);
    this.tools.append(this.other);
    this.table = new PagedTable("Config", this.columns(), { filter: "Find a field" });
    this.body.append(this.table.root);
  }

  columns() {
    const value = (name) => (row) =>
      row[name] === null ? "none" : typeof row[name] === "string" ? row[name] : JSON.stringify(row[name]);
    const mine = [
      { label: "field", left: true, wrap: true, value: (row) => row.field },
      { label: "value", left: true, wrap: true, value: value("mine") },
    ];
    return this.against ? [...mine, { label: this.against, left: true, wrap: true, value: value("theirs") }] : mine;
  }

  async offer(run) {
    if (this.offered) return;
    this.offered = true;
    const others = (await api("/api/runs").catch(() => [])).filter((row) => row.run_id !== run.runId);
    this.other.append(...others.map(({ run_id: name }) => el("option", { value: name }, name)));
  }

  async compare(run) {
    this.against = this.other.value;
    const data = await run.readConfig(this.against).catch(() => null);
    if (data === null) return;
    const empty = this.against ? `The config is the same as that of ${this.against}.` : "No data yet.";
    this.table = new PagedTable("Config", this.columns(), { filter: "Find a field", empty });
    this.body.replaceChildren(this.table.root);
    const differing = Object.entries(data.differences).map(([field, [mine, theirs]]) => ({ field, mine, theirs }));
    this.table.set(this.against ? differing : entries(data.config));
  }

  update(run) {
    if (run.config && run.config !== this.shown && !this.against) {
      this.shown = run.config;
      this.table.set(entries(run.config));
    }
  }
}

const entries = (config) => Object.entries(config).map(([field, mine]) => ({ field, mine }));

class VideoPanel extends Panel {
  constructor(spec, run) {
    super(spec);
    this.showBody(false);
    this.load(run);
  }

  async load(run) {
    const path = `${runPath(run.runId)}/videos`;
    const name = (await api(path).catch(() => []))[0]?.name; // newest first
    if (!name) return;
    const plays = { controls: true, muted: true, loop: true, preload: "metadata", "aria-label": name };
    const video = el("video", { src: `${path}/${encodeURIComponent(name)}`, ...plays });
    this.body.append(video, el("p", { class: "note" }, name));
    this.showBody(true);
  }
}

const OPPONENTS = 10;

class LeaguePanel extends Panel {
  constructor(spec) {
    super(spec);
    const kind = (row) => (row.env_steps === null ? row.kind : `at ${whole(row.env_steps)} steps`);
    this.players = new PagedTable(
      "Players",
      [
        { label: "player", left: true, value: (row) => row.called },
        { label: "kind", left: true, value: kind },
        { label: "rating", value: (row) => row.rating, text: figure },
        { label: "±", value: (row) => 3 * row.sigma, text: figure },
        { label: "Elo", value: (row) => row.elo, text: whole },
        { label: "matches", value: (row) => row.matches, text: whole },
        { label: "forfeits", value: (row) => row.forfeits, text: whole },
      ],
      { filter: "Find a player", sortBy: 2, descending: true },
    );
    this.matrix = el("div", {});
    this.body.append(this.players.root, this.matrix);
    this.showBody(false);
  }

  async update(run) {
    const newest = run.snapshot.checkpoints.filter((entry) => entry.fold_metrics).at(-1)?.name;
    if (!newest || newest === this.shown) return;
    this.shown = newest;
    const found = await api(`${runPath(run.runId)}/league`).catch(() => null);
    if (found === null) {
      this.shown = null;
      return;
    }
    const seats = [...new Set(found.players.map(({ seat }) => seat))];
    const called = ({ player, seat }) => (seats.length > 1 ? `${player} (${seat})` : player);
    this.players.set(found.players.map((row) => ({ ...row, called: called(row) })));
    const tables = seats.flatMap((seat) => {
      const table = this.payoff(found, seat);
      const of = seats.length > 1 ? ` of ${seat}` : "";
      return table ? [el("h4", {}, `Win rates${of} at ${found.checkpoint}`), table.root] : [];
    });
    this.matrix.replaceChildren(...tables);
    this.showBody(true);
  }

  /** A row for each trained player of this seat, a column for each of its strongest opponents. */
  payoff({ players, payoff }, seat) {
    const rows = players.filter((row) => row.seat === seat && Object.hasOwn(payoff, row.player));
    if (!rows.length) return null;
    const met = new Set(rows.flatMap(({ player }) => Object.keys(payoff[player])));
    const names = [...new Set([...players.map(({ player }) => player), ...met])]; // not all are rated
    const cell = (name) => ({
      label: name,
      value: ({ met }) => met.get(name)?.rate ?? null,
      text: (value, { met }) => (value === null ? figure(null) : `${percent(value)} of ${whole(met.get(name).games)}`),
    });
    const columns = names.filter((name) => met.has(name)).slice(0, OPPONENTS).map(cell);
    const mine = { label: "wins against", left: true, value: ({ player }) => player };
    const table = new PagedTable("Win rates", [mine, ...columns]);
    table.set(rows.map(({ player }) => ({ player, met: new Map(Object.entries(payoff[player])) })));
    return table;
  }
}

/** Clients of the run's gateways, for environments in other programs. */
class ClientsPanel extends Panel {
  constructor(spec) {
    super(spec);
    const counted = (name) => ({ label: name, value: (row) => row[name], text: whole });
    this.table = new PagedTable(
      "Clients",
      [
        { label: "client", left: true, value: (row) => row.client },
        { label: "gateway", left: true, value: (row) => row.gateway },
        ...["sessions", "turns", "older", "late", "abandoned"].map(counted),
      ],
      { filter: "Find a client", empty: "No client has played yet." },
    );
    this.line = el("p", { class: "note" });
    this.body.append(this.line, this.table.root);
  }

  gateways(run) {
    return run.snapshot.state.roles.filter(({ progress }) => progress.gateway);
  }

  fits(run) {
    return this.gateways(run).length > 0;
  }

  update(run) {
    const gateways = this.gateways(run);
    this.table.set(
      gateways.flatMap(({ id, progress }) =>
        Object.entries(progress.clients).map(([client, counts]) => ({ client, gateway: id, ...counts })),
      ),
    );
    const told = gateways.map(({ id, progress }) => {
      const trip = `${figure(progress.round_trip_p50_ms)} ms (p50), ${figure(progress.round_trip_p99_ms)} ms (p99)`;
      return `${id}: ${whole(progress.sessions)} sessions, ${whole(progress.sessions_away)} away; round trip ${trip}`;
    });
    setText(this.line, told.join(" · "));
    this.showBody(true);
  }
}

class EmptyPanel extends Panel {
  constructor(spec) {
    super(spec);
    this.showBody(false);
  }
}

const KINDS = {
  lines: ChartPanel,
  multiples: ChartPanel,
  shares: SharesPanel,
  return: ReturnPanel,
  fleet: FleetPanel,
  autoscaler: AutoscalerPanel,
  timeline: TimelinePanel,
  ledger: LedgerPanel,
  config: ConfigPanel,
  video: VideoPanel,
  league: LeaguePanel,
  clients: ClientsPanel,
};

export const makePanel = (spec, run) => new (KINDS[spec.kind] || EmptyPanel)(spec, run);
