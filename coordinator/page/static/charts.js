// Charts by uPlot (a global of uPlot.iife.min.js): lines with a band, stacked shares, dots; one cursor and zoom for all.

import { button, bytes, clock, compact, el, setText } from "./dom.js";

const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power); // ticks of bytes
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const SYNC = "run";
const charts = new Set();
let zoom = null;
let zoomed = () => {};
let picked = null;
let picking = 0;
const DOUBLE_CLICK_MILLISECONDS = 300;

export const onZoom = (listener) => {
  zoomed = listener;
};

/** Called with the x of a click on any chart, which is not a zoom. */
export const onPick = (listener) => {
  picked = listener;
};

/** Shows this range of the x axis in every chart; null shows all. */
export function zoomTo(range) {
  zoom = range;
  for (const chart of charts) chart.redraw();
  zoomed(zoom);
}

/** Redraws all charts with the colors of a new theme. */
export function recolor() {
  for (const chart of charts) chart.rebuild();
}

function color(name) {
  const probe = el("i", { class: "probe" });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const faded = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

export class Chart {
  /** Lines of `draw`: {label, hue (1 to 8, or "grey"), series, band: [low, high]?, dots?, best?}. */
  constructor({ label, format = compact, stacked = false, legend = true, wholeTicks = false }) {
    Object.assign(this, { label, format, stacked, legend, wholeTicks, hidden: new Set(), lines: [], bound: null });
    this.keys = el("div", { class: "legend" });
    this.value = el("output");
    this.plot = el("div", { class: "plot", tabindex: 0, role: "img" });
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.root = el("div", { class: "chart" }, legend ? this.keys : null, this.plot);
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.plot);
    charts.add(this);
  }

  close() {
    charts.delete(this);
    this.watch.disconnect();
    this.uplot?.destroy();
  }

  /** `axis`: steps or time; `bound`: {value, label} drawn across. */
  draw(lines, axis, bound = null) {
    const signature = JSON.stringify([axis, lines.map((line) => [line.label, line.hue, Boolean(line.band)])]);
    Object.assign(this, { lines, axis, bound });
    this.data = this.stackedIfSo(this.joined());
    if (signature === this.signature && this.uplot) this.redraw();
    else this.rebuild();
    this.signature = signature;
  }

  xs(series) {
    return this.axis === "time" ? series.unix_seconds : series.env_steps;
  }

  /** Columns over a common x: the values of each line, followed by low and high if it has a band. */
  joined() {
    const tables = this.lines.flatMap((line) => {
      const own = [[this.xs(line.series), line.series.mean]];
      return line.band ? [...own, [this.xs(line.band), line.band.low, line.band.high]] : own;
    });
    return tables.length ? window.uPlot.join(tables) : [[]];
  }

  stackedIfSo(data) {
    const hidden = this.lines.map((line) => this.hidden.has(line.label));
    return this.stacked ? stack(data, hidden) : data;
  }

  /** Returns the table: heads, and rows of x and values, newest first. */
  table() {
    const heads = this.lines.flatMap(({ label, band }) => (band ? [label, ...band.names] : [label]));
    const columns = this.joined();
    const rows = columns[0].map((_, at) => columns.map((column) => column[at])).reverse();
    return { heads, rows };
  }

  redraw() {
    if (!this.uplot) return;
    this.uplot.setData(this.data, false);
    const xs = this.data[0];
    const whole = xs.length ? [xs[0], xs.at(-1)] : [0, 1];
    const [min, max] = zoom || whole;
    this.uplot.setScale("x", min === max ? { min: min - 1, max: max + 1 } : { min, max });
    this.showValues(null);
  }

  rebuild() {
    this.uplot?.destroy();
    this.uplot = null;
    if (!this.lines.length || !this.plot.clientWidth) return;
    this.tints = this.lines.map((line) => color(`hue-${line.hue}`));
    if (this.legend) this.drawKeys();
    else this.values = [this.value];
    this.uplot = new window.uPlot(this.options(), this.data, this.plot);
    this.redraw();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width) return;
    if (!this.uplot) this.rebuild();
    else if (this.uplot.width !== width || this.uplot.height !== height) this.uplot.setSize({ width, height });
  }

  options() {
    const text = color("soft");
    const grid = { stroke: color("grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: text, font, grid, ticks: { show: false } };
    const times = (_, splits, _axis, _space, step) => splits.map((time) => timeTick(time, step));
    const steps = (_, splits) => splits.map(compact);
    const incrs = this.format === bytes ? POWERS : this.wholeTicks ? WHOLE : null;
    const values = (_, splits) => splits.map((value) => this.format(value));
    return {
      width: this.plot.clientWidth,
      height: this.plot.clientHeight,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      cursor: { sync: { key: SYNC, scales: ["x", null] }, drag: { setScale: false }, points: { size: 6 } },
      select: { show: true },
      scales: { x: { time: this.axis === "time" }, y: { range: (_, min, max) => this.range(min, max) } },
      axes: [
        { ...axis, size: 24, gap: 4, space: 62, values: this.axis === "time" ? times : steps },
        { ...axis, size: this.format === bytes ? 58 : 46, gap: 6, space: 32, values, ...(incrs ? { incrs } : {}) },
      ],
      ...this.seriesAndBands(),
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        setSelect: [(plot) => this.selected(plot)],
        draw: [(plot) => this.drawOver(plot)],
        ready: [(plot) => this.listen(plot)],
      },
    };
  }

  seriesAndBands() {
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, index) => {
      const stroke = this.tints[index];
      const common = { label: line.label, stroke, spanGaps: true };
      const show = !this.hidden.has(line.label);
      if (this.stacked) {
        const fill = faded(stroke, 0.75);
        series.push({ ...common, width: 1, points: { show: false }, fill: index ? undefined : fill });
        if (index) bands.push({ series: [index + 1, index], fill });
        return;
      }
      const size = line.series.mean.length > 60 ? 3.5 : 5;
      const points = { show: line.dots ? true : undefined, size, stroke, fill: stroke };
      series.push({ ...common, width: 1.75, show, points, paths: line.dots ? () => null : undefined });
      if (line.band) {
        const edge = { show, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [series.length - 1, series.length - 2], fill: faded(stroke, 0.18) });
      }
    });
    return { series, bands };
  }

  range(min, max) {
    if (this.stacked) return [0, 1];
    let [low, high] = min === null || min === undefined ? [0, 1] : [min, max];
    const bound = this.bound?.value;
    if (bound !== undefined && bound <= 4 * Math.max(high, 1)) high = Math.max(high, bound);
    if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 1.2 * low), Math.max(0, 1.2 * high)];
    const spread = high - low;
    return [low >= 0 && (this.wholeTicks || low < 0.5 * high) ? 0 : low - 0.06 * spread, high + 0.08 * spread];
  }

  /** Draws the bound and the best dot. */
  drawOver(plot) {
    const { ctx } = plot;
    const ratio = window.devicePixelRatio;
    ctx.save();
    if (this.bound && this.bound.value <= plot.scales.y.max) {
      const y = plot.valToPos(this.bound.value, "y", true);
      ctx.strokeStyle = ctx.fillStyle = color("ink");
      ctx.lineWidth = ratio;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(plot.bbox.left, y);
      ctx.lineTo(plot.bbox.left + plot.bbox.width, y);
      ctx.stroke();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      const above = y - plot.bbox.top > 16 * ratio;
      ctx.textBaseline = above ? "bottom" : "top";
      ctx.fillText(this.bound.label, plot.bbox.left + plot.bbox.width - 4 * ratio, y + (above ? -3 : 4) * ratio);
    }
    for (const line of this.lines.filter((each) => each.best && !this.hidden.has(each.label))) {
      const x = plot.valToPos(this.xs(line.best), "x", true);
      const inside = x >= plot.bbox.left && x <= plot.bbox.left + plot.bbox.width;
      if (inside) star(ctx, x, plot.valToPos(line.best.value, "y", true), 9 * ratio, color("star"), color("card"));
    }
    ctx.restore();
  }

  listen(plot) {
    let began = 0;
    plot.over.addEventListener("mousedown", (event) => (began = event.clientX));
    plot.over.addEventListener("click", (event) => {
      clearTimeout(picking);
      if (event.detail > 1 || Math.abs(event.clientX - began) >= 8 || !picked) return;
      const x = plot.posToVal(plot.cursor.left, "x");
      picking = setTimeout(() => picked(x, this.axis), DOUBLE_CLICK_MILLISECONDS);
    });
    plot.over.addEventListener("dblclick", () => zoomTo(null));
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoomTo(range);
  }

  /** Moves the cursor of all charts from value to value with the arrow keys. */
  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "Escape") zoomTo(null);
    if (!move || !this.uplot || !this.data[0].length) return;
    event.preventDefault();
    const last = this.data[0].length - 1;
    const at = Math.min(Math.max((this.uplot.cursor.idx ?? last) + move, 0), last);
    this.uplot.setCursor({ left: this.uplot.valToPos(this.data[0][at], "x"), top: 10 });
  }

  drawKeys() {
    this.values = this.lines.map(() => el("output", {}));
    const toggles = this.lines.map((line, index) => {
      const swatch = el("i", { class: line.dots ? "swatch dot" : "swatch", "aria-hidden": "true" });
      swatch.style.setProperty("--tint", `var(--hue-${line.hue})`);
      const pressed = !this.hidden.has(line.label);
      const toggle = () => {
        if (!this.hidden.delete(line.label)) this.hidden.add(line.label);
        this.data = this.stackedIfSo(this.joined());
        this.rebuild();
        this.keys.children[index].focus();
      };
      return button({ "aria-pressed": pressed, onclick: toggle }, swatch, line.label, this.values[index]);
    });
    this.keys.replaceChildren(...toggles);
  }

  /** Shows each line's value at the cursor, or its newest. */
  showValues(at) {
    const x = at === null || at === undefined ? Infinity : this.data[0][at];
    const shown = this.lines.map((line) => {
      const index = lastUpTo(this.xs(line.series), x);
      return index < 0 ? "–" : this.format(line.series.mean[index]);
    });
    this.values.forEach((output, index) => setText(output, shown[index]));
    const words = this.lines.map((line, index) => `${line.label} ${shown[index]}`).join(", ");
    const where = x === Infinity ? "newest" : this.axis === "time" ? clock(x) : `${compact(x)} env steps`;
    const bound = this.bound ? `; ${this.bound.label}` : "";
    this.plot.setAttribute("aria-label", `${this.label}, ${where}: ${words}${bound}`);
  }
}

/** Formats ticks with the precision of their spacing. */
function timeTick(unixSeconds, step) {
  const date = new Date(1000 * unixSeconds);
  if (step >= 86400) return date.toLocaleDateString("en-CA").slice(5);
  return date.toLocaleTimeString("en-GB").slice(0, step < 60 ? 8 : 5);
}

function lastUpTo(xs, x) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function stack(data, hidden) {
  const total = new Float64Array(data[0].length);
  const columns = data.slice(1).map((column, index) => {
    if (!hidden[index]) column.forEach((value, at) => (total[at] += value ?? 0));
    return Array.from(total);
  });
  return [data[0], ...columns];
}

function star(ctx, x, y, radius, fill, edge) {
  ctx.beginPath();
  for (let point = 0; point < 10; point += 1) {
    const angle = (Math.PI * point) / 5 - Math.PI / 2;
    const far = point % 2 ? radius * 0.45 : radius;
    ctx.lineTo(x + far * Math.cos(angle), y + far * Math.sin(angle));
  }
  ctx.closePath();
  ctx.setLineDash([]);
  ctx.fillStyle = fill;
  ctx.strokeStyle = edge;
  ctx.lineWidth = radius / 5;
  ctx.fill();
  ctx.stroke();
}
