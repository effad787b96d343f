// The list of models: sorted, filtered, and only as many rows as the window shows.

import { draw } from "./charts.js";
import { ask, labelOf, progressOf } from "./control.js";
import { byId, bytes, digits, duration, modelAddress, percent, report, setText } from "./words.js";

const ROW_CHART = 28;

/** Rows above and below the window, so that who scrolls or tabs finds them there. */
const SPARE_ROWS = 12;

/** Reasons that are the wish of somebody; any other of a model that is unavailable is a fault. */
const WISHED = new Set(["", "not loaded", "unloaded"]);

/** The order of states: what needs somebody comes first. */
const STATES = ["FAILED", "LOADING", "UNLOADING", "READY", "UNAVAILABLE"];

/** Values that rows are sorted by, each descending but for names and states. */
const COLUMNS = {
  name: null,
  state: ({ model, failed }) => -STATES.indexOf(failed ? "FAILED" : model.state),
  size: ({ model }) => model.size_bytes ?? -1,
  rate: ({ recent }) => recent.rate ?? 0,
  latency: ({ recent }) => recent.p99 ?? -1,
  errors: ({ recent, model }) => [recent.errors ?? 0, model.requests?.fail ?? 0],
};

/** The rows of all models that match; those in the window are in the document. */
export class Table {
  #entries = [];
  #rows = new Map();
  #column = "name";
  #status = null;
  #body = byId("model-rows");
  #above = byId("rows-above");
  #below = byId("rows-below");

  constructor({ refresh, histories }) {
    this.refresh = refresh;
    this.histories = histories;
    for (const button of document.querySelectorAll("#models thead button")) {
      button.addEventListener("click", () => this.#sort(button.dataset.column));
    }
    byId("sort").addEventListener("change", () => this.#sort(byId("sort").value));
    for (const event of ["scroll", "resize"]) {
      window.addEventListener(event, () => requestAnimationFrame(() => this.#window()), {
        passive: true,
      });
    }
  }

  /** Show the rows of a status whose names hold a text and that are of a kind; return how many. */
  show(status, text, { loaded, failed }) {
    const needle = text.toLowerCase();
    this.#status = status;
    this.histories.forget(status.models);
    this.#entries = entriesOf(status, this.histories).filter(
      (entry) =>
        entry.model.name.toLowerCase().includes(needle) &&
        (!loaded || entry.model.size_bytes != null) &&
        (!failed || entry.failed),
    );
    this.#order();
    this.#window();
    return this.#entries.length;
  }

  #sort(column) {
    this.#column = column;
    byId("sort").value = column;
    for (const button of document.querySelectorAll("#models thead button")) {
      const order = column === "name" ? "ascending" : "descending";
      const sorted = button.dataset.column === column ? order : "none";
      button.closest("th").setAttribute("aria-sort", sorted);
    }
    this.#order();
    this.#window();
  }

  /** Sort what the server has by name; what is equal stays in that order. */
  #order() {
    const value = COLUMNS[this.#column];
    this.#entries.sort((one, other) =>
      value ? compare(value(other), value(one)) || one.place - other.place : one.place - other.place,
    );
  }

  /** Have the rows of the window in the document, and room for those above and below it. */
  #window() {
    if (!this.#status || byId("overview").hidden) return;
    const count = this.#entries.length;
    const height = this.#body.firstElementChild?.getBoundingClientRect().height || 64;
    const start = -this.#above.getBoundingClientRect().top / height;
    const inWindow = Math.ceil(innerHeight / height);
    const first = Math.max(0, Math.min(Math.floor(start) - SPARE_ROWS, count - inWindow));
    const last = Math.min(count, Math.max(0, Math.floor(start)) + inWindow + SPARE_ROWS);
    const shown = this.#entries.slice(first, last);
    this.#place(shown, first);
    setHeight(this.#above, first * height);
    setHeight(this.#below, (count - last) * height);
    byId("models").setAttribute("aria-rowcount", count + 1);
  }

  #place(shown, first) {
    const wanted = new Set(shown.map(({ key }) => key));
    for (const [key, row] of this.#rows) {
      if (wanted.has(key)) continue;
      row.element.remove();
      if (!row.busy) this.#rows.delete(key);
    }
    let next = this.#body.firstElementChild;
    for (const [at, entry] of shown.entries()) {
      const row = this.#rows.get(entry.key) ?? new Row(this.refresh);
      this.#rows.set(entry.key, row);
      // One that is in its place is not moved: it would lose the focus.
      if (row.element === next) next = next.nextElementSibling;
      else this.#body.insertBefore(row.element, next);
      row.element.setAttribute("aria-rowindex", first + at + 2);
      row.show(entry, this.#status);
    }
  }
}

/** Return the rows of a status; the first of a name has the buttons of its model. */
function entriesOf({ models, bounds_ns: bounds }, histories) {
  let position = 0;
  return models.map((model, place) => {
    position = model.name === models[place - 1]?.name ? position + 1 : 0;
    const history = histories.of(model.name, model.version);
    return {
      key: `${position} ${model.name}`,
      model,
      place,
      leads: position === 0,
      failed: isFailed(model),
      history,
      recent: history.recent(bounds),
    };
  });
}

/** Tell whether a row is one of a load that failed, and of none that somebody wanted away. */
export function isFailed({ state, reason = "" }) {
  return state === "UNAVAILABLE" && !WISHED.has(reason);
}

function compare(one, other) {
  const [left, right] = [[one].flat(), [other].flat()];
  const at = left.findIndex((value, index) => value !== right[index]);
  return at < 0 ? 0 : left[at] - right[at];
}

function setHeight(space, height) {
  space.querySelector("td").style.height = `${height}px`;
}

/** One version of a model as a row of the table. */
class Row {
  #busy = "";
  #shown = "";

  constructor(refresh) {
    this.refresh = refresh;
    this.element = byId("row").content.cloneNode(true).firstElementChild;
    const find = (selector) => this.element.querySelector(selector);
    this.link = find("a");
    this.cells = {
      model: find(".model"),
      version: find(".version"),
      mark: find(".mark"),
      reason: find(".reason"),
      size: find("td.size"),
      rate: find(".rate .number"),
      more: find(".more"),
      latency: find(".latency .number"),
      errors: find(".errors"),
    };
    this.paths = {
      rate: { line: find(".rate .line"), area: find(".rate .area") },
      p50: { line: find(".latency .line") },
      p99: { line: find(".latency .second") },
    };
    this.buttons = [...this.element.querySelectorAll("button")];
    for (const button of this.buttons) {
      button.addEventListener("click", () => this.act(button.dataset.verb));
    }
  }

  /** Whether it waits for the end of a change, and has to be kept. */
  get busy() {
    return Boolean(this.#busy);
  }

  show({ model, leads, failed, history, recent }, status) {
    Object.assign(this, { model, leads, status });
    const words = this.#words(history, recent);
    const shown = JSON.stringify([leads, failed, words, model.fixed]);
    if (this.#shown !== shown) {
      this.#shown = shown;
      for (const [cell, text] of Object.entries(words)) setText(this.cells[cell], text);
      this.cells.reason.title = words.reason;
      this.link.title = model.name;
      this.link.href = leads
        ? modelAddress(model.name)
        : modelAddress(model.name, "versions", model.version);
      this.element.dataset.state = failed ? "FAILED" : model.state;
      this.element.dataset.idle = history.idle;
      this.#offer();
    }
    const tops = { rate: history.top("rate"), p50: history.top("p99"), p99: history.top("p99") };
    for (const [key, paths] of Object.entries(this.paths)) {
      draw(history, key, { ...paths, height: ROW_CHART, top: tops[key], now: status.now });
    }
  }

  #words(history, { rate, p50, p99, errors }) {
    const { name, version, state, reason, size_bytes: size } = this.model;
    return {
      model: name,
      version: version ? `version ${version}` : "",
      mark: state,
      reason: reason ?? "",
      size: size == null ? "" : bytes(size),
      more: this.#more(),
      rate: history.idle ? "" : `${digits(rate ?? 0)}/s`,
      latency: p50 === null ? "" : `${duration(p50)}, ${duration(p99)}`,
      errors: errors ? percent(errors) : "",
    };
  }

  #more() {
    const { fail = 0 } = this.model.requests ?? {};
    const pending = this.model.pending ?? 0;
    const parts = [];
    if (pending) parts.push(`${pending.toLocaleString("en")} waiting`);
    if (fail) parts.push(`${fail.toLocaleString("en")} failed`);
    return parts.join(", ");
  }

  #offer() {
    const loaded = this.model.size_bytes != null;
    const moving = this.model.state === "LOADING" || this.model.state === "UNLOADING";
    for (const button of this.buttons) {
      const load = button.dataset.verb === "load";
      const verb = load && loaded ? "reload" : button.dataset.verb;
      const busy = this.#busy === button.dataset.verb;
      button.hidden = !this.leads || this.model.fixed || (!load && !loaded && !busy);
      setText(button, busy ? progressOf(verb) : labelOf(verb));
      button.setAttribute("aria-label", `${button.textContent} ${this.model.name}`);
      // Not disabled: the focus would be lost.
      button.setAttribute("aria-disabled", String(Boolean(this.#busy) || moving));
    }
  }

  async act(verb) {
    if (this.#busy || this.model.state === "LOADING" || this.model.state === "UNLOADING") return;
    const { name, size_bytes: size } = this.model;
    this.#busy = verb;
    this.#offer();
    try {
      const wanted = verb === "load" && size != null ? "reload" : verb;
      // The next status first: the state that the button shows is then the new one.
      await ask(wanted, name, this.status.memory, this.refresh);
    } catch (error) {
      report(`${verb} of “${name}”: ${error.message}`);
    }
    this.#busy = "";
    this.#offer();
  }
}
