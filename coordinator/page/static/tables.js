// A table of any length, sorted by a click on a column's head; only one page of rows is in the document.

import { button, el, setText, whole } from "./dom.js";

const PAGE = 50;

export class PagedTable {
  /** Columns: {label, value(row), text(value, row)?, node(row)?, left?, wrap?}; `filter` finds rows by their text. */
  constructor(caption, columns, { filter = "", empty = "Nothing yet.", sortBy = null, descending = false } = {}) {
    Object.assign(this, { columns, empty, sortBy, descending, rows: [], page: 0, needle: "" });
    this.heads = columns.map((column, index) => this.head(column, index));
    this.body = el("tbody");
    const head = el("thead", {}, el("tr", {}, ...this.heads));
    const table = el("table", {}, el("caption", { class: "unseen" }, caption), head, this.body);
    this.count = el("span", { class: "count" });
    this.back = button({ class: "quiet", onclick: () => this.turn(-1) }, "Previous");
    this.on = button({ class: "quiet", onclick: () => this.turn(1) }, "Next");
    this.foot = el("div", { class: "pages" }, this.back, this.count, this.on);
    const scroll = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table);
    this.root = el("div", { class: "paged" }, filter ? this.finder(filter) : null, scroll, this.foot);
    this.draw();
  }

  static side(column) {
    return [column.left && "left", column.wrap && "wrap"].filter(Boolean).join(" ") || null;
  }

  head(column, index) {
    const sort = () => {
      this.descending = this.sortBy === index ? !this.descending : !column.left;
      this.sortBy = index;
      this.turn(-this.page);
    };
    const sorter = column.label ? button({ onclick: sort }, column.label) : null;
    return el("th", { scope: "col", class: PagedTable.side(column) }, sorter);
  }

  finder(label) {
    const find = (event) => {
      this.needle = event.target.value.trim().toLowerCase();
      this.turn(-this.page);
    };
    return el("input", { type: "search", placeholder: label, "aria-label": label, oninput: find });
  }

  turn(pages) {
    this.page += pages;
    this.draw();
  }

  set(rows) {
    this.rows = rows;
    this.draw();
  }

  text(column, row) {
    const value = column.value(row);
    return column.text ? column.text(value, row) : String(value ?? "–");
  }

  chosen() {
    const found = (row) => this.columns.some((column) => this.text(column, row).toLowerCase().includes(this.needle));
    const rows = this.needle ? this.rows.filter(found) : this.rows;
    if (this.sortBy === null) return rows;
    const { value } = this.columns[this.sortBy];
    const sign = this.descending ? -1 : 1;
    return rows.toSorted((one, other) => sign * compare(value(one), value(other)));
  }

  draw() {
    const rows = this.chosen();
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const first = this.page * PAGE;
    const shown = rows.slice(first, first + PAGE);
    this.heads.forEach((head, index) => {
      const order = this.descending ? "descending" : "ascending";
      head.setAttribute("aria-sort", this.sortBy === index ? order : "none");
    });
    if (!shown.length) {
      const words = this.rows.length ? "No matching rows." : this.empty;
      this.body.replaceChildren(el("tr", { class: "none" }, el("td", { colspan: this.columns.length }, words)));
    } else {
      if (this.body.firstElementChild?.className === "none") this.body.replaceChildren();
      while (this.body.rows.length > shown.length) this.body.lastElementChild.remove();
      while (this.body.rows.length < shown.length) this.body.append(this.emptyRow());
      shown.forEach((row, index) => this.fill(this.body.rows[index], row));
    }
    this.foot.hidden = pages === 1;
    setText(this.count, `${whole(first + 1)}–${whole(first + shown.length)} of ${whole(rows.length)}`);
    this.back.disabled = this.page === 0;
    this.on.disabled = this.page === pages - 1;
  }

  emptyRow() {
    return el("tr", {}, ...this.columns.map((column) => el("td", { class: PagedTable.side(column) })));
  }

  /** Updates only cells that changed, so that the others keep the focus. */
  fill(element, row) {
    this.columns.forEach((column, index) => {
      const cell = element.cells[index];
      if (!column.node) {
        setText(cell, this.text(column, row));
      } else if (cell.dataset.value !== String(column.value(row))) {
        cell.dataset.value = String(column.value(row));
        cell.replaceChildren(column.node(row));
      }
    });
  }
}

function compare(one, other) {
  const missing = Number(one === null || one === undefined) - Number(other === null || other === undefined);
  if (missing) return missing;
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one ?? "").localeCompare(String(other ?? ""), "en", { numeric: true });
}
