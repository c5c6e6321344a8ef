// Builds elements and formats values. Data of a run enters the page as text, never as HTML.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Sets text only if it differs, to keep selections and the position of screen readers. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Splits a text into nodes; parts in backticks become code. */
export function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

const NONE = "–";
const compactly = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const wholly = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const finely = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Formats the value that ranks a checkpoint, and its name if it is not the mean return. */
export const ranked = (value, by) => (known(value) && by ? `${figure(value)} (${by})` : figure(value));

/** Formats a metric with four digits; very small values in scientific notation. */
export function figure(value) {
  if (!known(value)) return NONE;
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return Math.abs(value) >= 1e4 ? compact(value) : finely.format(value);
}

export function compact(value) {
  return known(value) ? compactly.format(value) : NONE;
}

export function whole(value) {
  return known(value) ? wholly.format(value) : NONE;
}

export function percent(value) {
  return known(value) ? `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %` : NONE;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < unit.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${unit[power]}`;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 100) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Formats local time, with the date if it is not today. */
export function clock(unixSeconds) {
  const date = new Date(1000 * unixSeconds);
  const today = date.toDateString() === new Date().toDateString();
  return known(unixSeconds) && today ? date.toLocaleTimeString("en-GB") : day(unixSeconds, 8);
}

/** Formats local date and time, by default to the minute. */
export function day(unixSeconds, digits = 5) {
  if (!known(unixSeconds)) return NONE;
  const date = new Date(1000 * unixSeconds);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB").slice(0, digits)}`;
}

/** Fetches JSON; throws an `Error` with the server's message and `status` (0: no response). */
export async function api(path, body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const request = body === undefined ? {} : { method: "POST", headers, body: JSON.stringify(body) };
  let reply;
  try {
    reply = await fetch(path, { cache: "no-store", ...request });
  } catch {
    throw Object.assign(new Error("the page's server is not responding"), { status: 0 });
  }
  const data = await reply.json().catch(() => ({}));
  if (!reply.ok) {
    throw Object.assign(new Error(data.error || `the server responded with ${reply.status}`), { status: reply.status });
  }
  return data;
}

export const runPath = (runId) => `/api/runs/${encodeURIComponent(runId)}`;

/** Shows the result of an order for some seconds; screen readers announce it. */
export function notify(text, failed = false) {
  const line = el("p", { class: failed ? "failed" : "done" }, text);
  document.getElementById("messages").append(line);
  setTimeout(() => line.remove(), failed ? 12000 : 5000);
}
