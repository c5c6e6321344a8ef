// "Why did it change here?": a dialog with what moved the policy to a version, as `stagecoach explain` ranks it.

import { api, button, el, figure, notify, percent, runPath, whole } from "./dom.js";

const MEASURES = [
  ["gradient", "gradient_norm"],
  ["cosine", "cosine"],
  ["advantage", "advantage"],
  ["KL", "kl"],
  ["TD error", "td_error"],
  ["return", "mean_return"],
];

/** Asks for a version, explains it, and shows the table in the same dialog. */
export function explain(runId, version) {
  const field = (name, value) => el("input", { name, type: "number", min: 1, value, required: true });
  const fields = [
    el("label", {}, "Policy version", field("version", version)),
    el("label", {}, "Updates to explain, up to it", field("last", 1)),
  ];
  const answer = el("div", { class: "answer", role: "status" });
  const submit = el("button", { type: "submit", class: "primary" }, "Explain");
  const close = button({ onclick: () => dialog.close() }, "Close");
  const head = el("h2", { id: "why" }, "Why did it change here?");
  const text = "The log is learned again from the checkpoint before (archive: all).";
  const form = el("form", {}, head, el("p", {}, text), ...fields, el("div", { class: "buttons" }, close, submit), answer);
  const dialog = el("dialog", { "aria-labelledby": "why", class: "wide" }, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    answer.replaceChildren(el("p", {}, "learning again …"));
    const query = new URLSearchParams(new FormData(form));
    try {
      answer.replaceChildren(...table(await api(`${runPath(runId)}/explain?${query}`)));
    } catch (error) {
      answer.replaceChildren(el("p", { class: "failed" }, error.message));
      if (!dialog.isConnected) notify(error.message, true);
    }
    submit.disabled = false;
  });
  dialog.showModal();
}

function table({ influences, episodes, by_worker: byWorker, start }) {
  if (!influences.length) return [el("p", {}, "Nothing was learned in these updates.")];
  const workers = Object.entries(byWorker).map(([worker, share]) => `${worker || "older fragments"} ${percent(share)}`);
  const found = [el("p", {}, `By worker: ${workers.join(", ")}. Learned again from ${start}.`), ranked(influences)];
  return episodes.length ? [...found, el("h3", {}, "By episode"), ranked(episodes)] : found;
}

function ranked(influences) {
  const measures = MEASURES.filter(([, name]) => influences.some((each) => each[name] !== null));
  const heads = ["version", "worker", "position", "rows", "share", ...measures.map(([label]) => label)];
  const rows = influences.map((each) => {
    const first = [whole(each.version), each.worker, each.position, whole(each.transitions), percent(each.share)];
    return el("tr", {}, ...[...first, ...measures.map(([, name]) => figure(each[name]))].map((text) => el("td", {}, text)));
  });
  const head = el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", {}, text))));
  return el("div", { class: "scroll" }, el("table", {}, head, el("tbody", {}, ...rows)));
}
