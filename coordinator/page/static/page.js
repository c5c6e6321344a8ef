// Entry point: shows the index or one run, depending on the URL, and reconnects to the server.

import { recolor } from "./charts.js";
import { api, button, day, el, ranked, runPath, setText, whole } from "./dom.js";
import { Overlay } from "./overlay.js";
import { RunPage } from "./run.js";
import { PagedTable } from "./tables.js";

const INDEX_MILLISECONDS = 5000;
const LONGEST_PAUSE_SECONDS = 15;
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main");
const banner = document.getElementById("banner");

function startTheme() {
  const chooser = document.getElementById("theme");
  let theme = read("theme") || "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    setText(chooser, { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme]);
    recolor();
  };
  chooser.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("theme", theme);
    } catch {} // storage is disabled
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  apply();
}

function read(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function showBanner(text, ...more) {
  if (banner.dataset.text === text) return;
  banner.dataset.text = text;
  banner.hidden = !text;
  banner.replaceChildren(el("span", {}, text), ...more);
}

const REMEDIES = { 401: "open the URL with the token that `stagecoach page` printed", 429: "wait a minute" };

/** Retries `work` until it succeeds, with growing pauses; a banner shows the error and a button to retry now. */
async function insistently(work) {
  for (let pause = 1; ; pause = Math.min(2 * pause, LONGEST_PAUSE_SECONDS)) {
    try {
      return await work();
    } catch (error) {
      if (error.status === 404) throw error;
      const needs = REMEDIES[error.status];
      await countDown(`${capital(error.message)}${needs ? `; ${needs}` : ""}`, pause);
    }
  }
}

function countDown(text, pause) {
  return new Promise((resolve) => {
    let left = pause;
    const done = () => {
      clearInterval(timer);
      resolve();
    };
    const now = button({ onclick: done }, "Retry now");
    const left_ = el("span", { class: "count" });
    const tick = () => {
      setText(left_, `retrying in ${left} s`);
      left -= 1;
      if (left < 0) done();
    };
    showBanner("");
    showBanner(`${text}. `, el("span", { class: "retry" }, left_, now));
    const timer = setInterval(tick, 1000);
    tick();
  });
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

async function showRun(runId) {
  document.getElementById("where").append(el("span", { class: "crumb" }, runId));
  main.replaceChildren(el("p", { class: "absent" }, "Loading the run …"));
  const path = runPath(runId);
  let page = null;
  for (;;) {
    let snapshot;
    try {
      const specs = page ? null : await insistently(() => api("/api/panels"));
      const { can_order: canOrder } = page ? {} : await insistently(() => api("/api/page"));
      snapshot = await insistently(() => api(path));
      showBanner(snapshot.banner);
      if (!page) {
        page = new RunPage(runId, specs, canOrder);
        main.replaceChildren(page.root);
        document.getElementById("tools").replaceChildren(page.tools);
      }
    } catch (error) {
      showBanner("");
      const index = el("a", { href: "/" }, "All runs");
      main.replaceChildren(el("p", { class: "absent" }, `${capital(error.message)}. `, index));
      return;
    }
    page.take(snapshot);
    page.readSeries();
    await updates(path, page);
  }
}

/** Follows the server's events until the connection breaks. */
function updates(path, page) {
  return new Promise((resolve) => {
    const source = new EventSource(`${path}/updates`);
    source.addEventListener("snapshot", (event) => {
      const snapshot = JSON.parse(event.data);
      showBanner(snapshot.banner);
      page.take(snapshot);
    });
    source.addEventListener("rows", () => page.readSeries());
    source.addEventListener("error", () => {
      source.close();
      setTimeout(resolve, 500);
    });
  });
}

async function showIndex() {
  document.title = "Runs · Stagecoach";
  const overlay = new Overlay();
  const link = (row) => el("a", { href: `/runs/${encodeURIComponent(row.run_id)}` }, row.run_id);
  const state = (row) => el("span", { class: "state", "data-state": row.state }, row.state);
  const table = new PagedTable(
    "All runs",
    [
      { label: "", value: (row) => row.run_id, node: (row) => overlay.box(row.run_id) },
      { label: "run", left: true, value: (row) => row.run_id, node: link },
      { label: "state", left: true, value: (row) => row.state, node: state },
      { label: "best", value: (row) => row.best, text: (best, row) => ranked(best, row.ranked_by) },
      { label: "env steps", value: (row) => row.env_steps, text: whole },
      { label: "environment", left: true, value: (row) => row.environment, text: (value) => value || "–" },
      { label: "algorithm", left: true, value: (row) => row.algorithm, text: (value) => value || "–" },
      { label: "created", left: true, value: (row) => row.created, text: day },
      { label: "reason", left: true, value: (row) => row.reason, text: (value) => value || "–" },
    ],
    { filter: "Find a run", empty: "No runs yet. Start one with: stagecoach train cartpole" },
  );
  const hint = "Select runs to plot their training returns in one chart. Best is the mean return of the second evaluation, from other starts.";
  const note = el("p", { class: "note" }, hint);
  main.replaceChildren(el("div", { class: "index" }, el("h1", {}, "Runs"), note, overlay.root, table.root));
  for (;;) {
    const rows = await insistently(() => api("/api/runs"));
    showBanner("");
    table.set(rows.toReversed());
    note.hidden = !rows.length;
    overlay.read();
    await new Promise((resolve) => setTimeout(resolve, INDEX_MILLISECONDS));
  }
}

startTheme();
const run = /^\/runs\/([^/]+)\/?$/.exec(location.pathname);
if (run) showRun(decodeURIComponent(run[1]));
else showIndex();
