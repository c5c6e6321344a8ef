// The training returns of the runs that are checked in the list, in one chart.

import { Chart } from "./charts.js";
import { api, el, figure, runPath } from "./dom.js";

const METRIC = "rollout/ep_rew_mean";
const HUES = 8;

export class Overlay {
  constructor() {
    this.shown = new Map(); // run → {hue, series}
    this.chart = new Chart({ label: "Training return", format: figure });
    this.absent = el("p", { class: "absent" }, "No episode of these runs has ended yet.");
    const title = el("h2", { id: "overlay" }, "Training return over env steps");
    const attributes = { class: "overlay", hidden: true, "aria-labelledby": title.id };
    this.root = el("section", attributes, title, this.absent, this.chart.root);
  }

  /** The checkbox that adds a run to the chart. */
  box(runId) {
    const attributes = { type: "checkbox", checked: this.shown.has(runId), "aria-label": `Show ${runId} in the chart` };
    return el("input", { ...attributes, onchange: (event) => this.choose(runId, event.target.checked) });
  }

  choose(runId, chosen) {
    if (chosen) {
      const taken = [...this.shown.values()].map(({ hue }) => hue);
      const free = Array.from({ length: HUES }, (_, index) => index + 1).find((hue) => !taken.includes(hue));
      this.shown.set(runId, { hue: free ?? (this.shown.size % HUES) + 1, series: null });
    } else this.shown.delete(runId);
    this.draw();
    return this.read();
  }

  /** Reads the curves again; a run that cannot be read keeps its curve. */
  async read() {
    const query = new URLSearchParams({ stream: "train", metric: METRIC });
    const reading = [...this.shown].map(async ([runId, one]) => {
      const found = await api(`${runPath(runId)}/series?${query}`).catch(() => ({}));
      one.series = found[METRIC] ?? one.series;
    });
    await Promise.all(reading);
    this.draw();
  }

  draw() {
    const read = [...this.shown].filter(([, { series }]) => series?.mean.length);
    this.root.hidden = !this.shown.size;
    this.absent.hidden = read.length > 0;
    this.chart.root.hidden = !read.length;
    const lines = read.map(([label, { hue, series }]) => ({ label, hue, series }));
    if (lines.length) this.chart.draw(lines, "steps");
  }
}
