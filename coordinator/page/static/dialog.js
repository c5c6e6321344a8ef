// A modal form: Escape or Cancel resolves to null, the button to the values of its fields.

import { button, el } from "./dom.js";

/** Fields: {name, label, type?, value?, required?, options?}. */
export function ask(title, fields, { text = "", yes = "OK", danger = false } = {}) {
  const labels = fields.map((field) => el("label", {}, field.label, input(field)));
  const cancel = button({ onclick: () => dialog.close() }, "Cancel");
  const submit = el("button", { type: "submit", class: danger ? "danger" : "primary" }, yes);
  const buttons = el("div", { class: "buttons" }, cancel, submit);
  const head = el("h2", { id: "question" }, title);
  const form = el("form", { method: "dialog" }, head, text ? el("p", {}, text) : null, ...labels, buttons);
  const dialog = el("dialog", { "aria-labelledby": "question" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    let answer = null;
    form.addEventListener("submit", () => (answer = Object.fromEntries(new FormData(form))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
  });
}

function input({ name, type = "text", value = "", required = false, options }) {
  if (!options)
    return el("input", { name, type, value, required, min: type === "number" ? 1 : null, autocomplete: "off" });
  return el("select", { name }, ...options.map((option) => el("option", { selected: option === value }, option)));
}
