// The status page: asks for status.json each second and shows what has changed.
//
// Names come from clients: they are only ever set as text, never as HTML.

import { draw } from "./charts.js";
import { History } from "./history.js";

const POLL_MILLISECONDS = 1000;
const TIMEOUT_MILLISECONDS = 10_000;
const NEW_ROWS_AT_A_TIME = 100;
const ROW_CHART = 28;
const TOTAL_CHART = 40;
const MOST_PROBLEMS = 5;

/** Reasons that are the wish of somebody; any other of a model that is unavailable is a fault. */
const WISHED = new Set(["", "not loaded", "unloaded"]);

const byId = (id) => document.getElementById(id);

// --- words ---

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(size) {
  const power = size ? Math.min(Math.floor(Math.log2(size) / 10), UNITS.length - 1) : 0;
  return `${digits(size / 1024 ** power)} ${UNITS[power]}`;
}

function digits(value) {
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? 1 : 2);
}

function duration(ns) {
  if (ns === null) return "–";
  if (ns < 1e6) return `${digits(Math.round(ns / 1e3))} µs`;
  return ns < 1e9 ? `${digits(ns / 1e6)} ms` : `${digits(ns / 1e9)} s`;
}

function uptime(seconds) {
  const whole = Math.floor(seconds);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count);
  const shown = first < 0 ? parts.slice(-1) : parts.slice(first, first + 2);
  return `up ${shown.map(([count, unit]) => `${count} ${unit}`).join(" ")}`;
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- problems ---

function report(text) {
  const problem = byId("problem").content.cloneNode(true).firstElementChild;
  problem.querySelector("span").textContent = text;
  problem.querySelector("button").addEventListener("click", () => problem.remove());
  byId("problems").append(problem);
  while (byId("problems").children.length > MOST_PROBLEMS) byId("problems").firstChild.remove();
}

// --- one row ---

/** One version of a model as a row of the table. */
class Row {
  #busy = "";
  #shown = "";
  #visible = false;

  constructor() {
    this.element = byId("row").content.cloneNode(true).firstElementChild;
    const find = (selector) => this.element.querySelector(selector);
    this.cells = {
      model: find(".model"),
      version: find(".version"),
      mark: find(".mark"),
      reason: find(".reason"),
      size: find("td.size"),
      rate: find(".rate .number"),
      more: find(".more"),
      latency: find(".latency .number"),
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

  set visible(visible) {
    this.#visible = visible;
    if (visible && this.history) this.draw();
  }

  /** Show a model; `leads` is whether this is the first row of its name. */
  show(model, leads, history, { bounds_ns: bounds, now }) {
    Object.assign(this, { model, leads, history, bounds, now });
    const words = this.#words();
    const shown = JSON.stringify([leads, words]);
    if (this.#shown !== shown) {
      this.#shown = shown;
      for (const [cell, text] of Object.entries(words)) setText(this.cells[cell], text);
      const failed = model.state === "UNAVAILABLE" && !WISHED.has(words.reason);
      this.element.dataset.state = failed ? "FAILED" : model.state;
      this.#offer();
    }
    if (this.#visible) this.draw();
  }

  draw() {
    const { history, now } = this;
    const { rate, p50, p99 } = history.recent(this.bounds);
    if (this.element.dataset.idle !== String(history.idle)) {
      this.element.dataset.idle = history.idle;
    }
    setText(this.cells.rate, history.idle ? "" : `${digits(rate ?? 0)}/s`);
    setText(this.cells.latency, p50 === null ? "" : `${duration(p50)}, ${duration(p99)}`);
    const tops = { rate: history.top("rate"), p50: history.top("p99"), p99: history.top("p99") };
    for (const [key, paths] of Object.entries(this.paths)) {
      draw(history, key, { ...paths, height: ROW_CHART, top: tops[key], now });
    }
  }

  #words() {
    const { name, version, state, reason, size_bytes: size } = this.model;
    return {
      model: name,
      version: version ? `version ${version}` : "",
      mark: state,
      reason: reason ?? "",
      size: size == null ? "" : bytes(size),
      more: this.#more(),
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
      const busy = this.#busy === button.dataset.verb;
      button.hidden = !this.leads || (!load && !loaded && !busy);
      setText(button, busy ? (load ? "Loading…" : "Unloading…") : labelOf(load, loaded));
      button.setAttribute("aria-label", `${button.textContent} ${this.model.name}`);
      // Not disabled: the focus would be lost.
      button.setAttribute("aria-disabled", String(Boolean(this.#busy) || moving));
    }
  }

  async act(verb) {
    if (this.#busy || this.model.state === "LOADING" || this.model.state === "UNLOADING") return;
    const { name } = this.model;
    this.#busy = verb;
    this.#offer();
    try {
      await control(name, verb);
    } catch (error) {
      report(`${verb} of “${name}”: ${error.message}`);
    }
    // The next status first: the state that the button shows is then the new one.
    await poll();
    this.#busy = "";
    this.#offer();
  }
}

function labelOf(load, loaded) {
  if (!load) return "Unload";
  return loaded ? "Reload" : "Load";
}

async function control(name, verb) {
  const path = `v2/repository/models/${encodeURIComponent(name)}/${verb}`;
  const answer = await fetch(path, { method: "POST" });
  if (answer.ok) return;
  const { error } = await answer.json().catch(() => ({}));
  throw new Error(error ?? `${answer.status} ${answer.statusText}`);
}

// --- the table ---

/** The rows of all models, in the order of the server. */
class Table {
  #rows = new Map();
  #histories = new Map();
  #body = document.querySelector("#models tbody");
  #turn = 0;
  #watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) target.row.visible = isIntersecting;
  });

  /** Show a status; where there are many new rows, they come a few at a time. */
  show(status) {
    const turn = ++this.#turn;
    const wanted = keyed(status.models);
    for (const [key, row] of this.#rows) {
      if (!wanted.has(key)) this.#remove(key, row);
    }
    this.#forget(status.models);
    const filling = this.#fill(wanted, status);
    const step = () => {
      if (turn === this.#turn && !filling.next().done) requestAnimationFrame(step);
    };
    step();
  }

  /** Take what the server remembers of a model, before its first status is shown. */
  remember(model, at, bounds) {
    this.#history({ ...model, requests: model }, { bounds_ns: bounds, now: at });
  }

  /** Show only rows whose name holds a text, and perhaps only loaded ones; return how many. */
  filter(text, loadedOnly) {
    const needle = text.toLowerCase();
    let shown = 0;
    for (const { element, model } of this.#rows.values()) {
      const left = loadedOnly && model.size_bytes == null;
      const hidden = left || !model.name.toLowerCase().includes(needle);
      if (element.hidden !== hidden) element.hidden = hidden;
      shown += !hidden;
    }
    return shown;
  }

  /** Show row by row, with a rest after each few that had to be made. */
  *#fill(wanted, status) {
    let last = null;
    let made = 0;
    for (const [key, { model, leads }] of wanted) {
      const row = this.#rows.get(key) ?? this.#add(key);
      const place = last ? last.nextSibling : this.#body.firstChild;
      if (row.element !== place) {
        this.#body.insertBefore(row.element, place);
        if (++made % NEW_ROWS_AT_A_TIME === 0) yield;
      }
      last = row.element;
      row.show(model, leads, this.#history(model, status), status);
    }
  }

  #add(key) {
    const row = new Row();
    row.element.row = row;
    this.#rows.set(key, row);
    this.#watcher.observe(row.element);
    return row;
  }

  #remove(key, row) {
    this.#watcher.unobserve(row.element);
    row.element.remove();
    this.#rows.delete(key);
  }

  #history({ name, version = "", requests = {} }, { bounds_ns: bounds, now }) {
    const key = `${version} ${name}`;
    const history = this.#histories.get(key) ?? new History();
    this.#histories.set(key, history);
    history.add(now, requests.success ?? 0, requests.buckets ?? [], bounds);
    return history;
  }

  #forget(models) {
    if (this.#histories.size <= 2 * models.length + NEW_ROWS_AT_A_TIME) return;
    const known = new Set(models.map(({ name, version = "" }) => `${version} ${name}`));
    for (const key of this.#histories.keys()) {
      if (!known.has(key)) this.#histories.delete(key);
    }
  }
}

/** Return models by the key of their row: the first row of a name outlives the versions in it. */
function keyed(models) {
  const rows = new Map();
  let position = 0;
  for (const [index, model] of models.entries()) {
    position = model.name === models[index - 1]?.name ? position + 1 : 0;
    rows.set(`${position} ${model.name}`, { model, leads: position === 0 });
  }
  return rows;
}

// --- the head of the page ---

const totals = new History();
const paths = (chart) => {
  const [first, second] = byId(chart).querySelectorAll("path");
  return { first, second };
};
const rateChart = paths("rate-chart");
const latencyChart = paths("latency-chart");

function showHead({ server, memory, requests, bounds_ns: bounds, now, ...status }) {
  pill("live", true, "live");
  pill("ready", server.ready, server.ready ? "ready" : "not ready");
  setText(byId("version"), server.version);
  setText(byId("uptime"), uptime(server.uptime_seconds));
  document.body.dataset.controllable = server.controllable;
  setText(byId("ready-models"), status.ready_models.toLocaleString("en"));
  setText(byId("model-count"), `ready of ${status.model_count.toLocaleString("en")}`);
  setText(byId("fails"), requests.fail ? `${plural(requests.fail, "failed request")}` : "");
  showMemory(memory);
  totals.add(now, requests.success ?? 0, requests.buckets ?? [], bounds);
  showRequests(bounds, now);
}

function showMemory({ used_bytes: used, total_bytes: total }) {
  setText(byId("used"), bytes(used));
  setText(byId("total"), total === null ? "" : `of ${bytes(total)}`);
  byId("capacity").value = total ? Math.min(used / total, 1) : 0;
}

function showRequests(bounds, now) {
  const { rate, p50, p99 } = totals.recent(bounds);
  const [fastest, slowest] = [totals.top("rate"), totals.top("p99")];
  setText(byId("rate"), digits(rate ?? 0));
  setText(byId("rate-top"), fastest ? `at most ${digits(fastest)}` : "");
  setText(byId("p50"), duration(p50));
  setText(byId("p99"), p99 === null ? "" : `p99 ${duration(p99)}, at most ${duration(slowest)}`);
  const { first: line, second: area } = { first: rateChart.second, second: rateChart.first };
  draw(totals, "rate", { line, area, height: TOTAL_CHART, top: fastest, now });
  const axes = { height: TOTAL_CHART, top: slowest, now };
  draw(totals, "p50", { line: latencyChart.first, ...axes });
  draw(totals, "p99", { line: latencyChart.second, ...axes });
}

function pill(id, is, text) {
  byId(id).hidden = false;
  byId(id).dataset.is = is;
  setText(byId(id), text);
}

// --- asking ---

const table = new Table();
let latest = null;
let timer = 0;
let asking = null;
let remembered = false;

/** Ask for the status and show it; who asks meanwhile waits for the same answer. */
function poll() {
  asking ??= ask().finally(() => {
    asking = null;
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(poll, POLL_MILLISECONDS);
  });
  return asking;
}

async function ask() {
  try {
    // Without it charts begin now, and the status is what matters.
    if (!remembered) await remember().catch(() => {});
    const answer = await fetch(address(), { signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS) });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    const status = await answer.json();
    show(status);
  } catch (error) {
    pill("live", false, "no answer");
    byId("ready").hidden = true;
    byId("live").title = error.message;
  }
}

/** Take the last two minutes from the server: a page that is loaded again has lost nothing. */
async function remember() {
  remembered = true;
  const answer = await fetch("history.json", { signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS) });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  const { recent, bounds_ns: bounds } = await answer.json();
  for (const { at_seconds: at, success, buckets, models } of recent) {
    totals.add(at, success, buckets, bounds);
    for (const model of models) table.remember(model, at, bounds);
  }
}

/** Only where there are more models than the server lists is it asked to search. */
function address() {
  const search = byId("search").value;
  const truncated = latest && (latest.searched || latest.matching > latest.models.length);
  return search && truncated ? `status.json?search=${encodeURIComponent(search)}` : "status.json";
}

function show(status) {
  const searched = latest?.searched ?? false;
  latest = status;
  latest.searched = searched || status.matching > status.models.length;
  latest.now = status.server.uptime_seconds;
  byId("live").title = "";
  showHead(status);
  table.show(status);
  filter();
}

function filter() {
  if (!latest) return;
  const text = byId("search").value;
  const loadedOnly = byId("loaded").checked;
  const shown = table.filter(text, loadedOnly);
  const all = plural(latest.matching, "row");
  const narrowed = text || loadedOnly;
  setText(byId("shown"), narrowed || shown < latest.matching ? `${shown} of ${all}` : "");
  byId("empty").hidden = latest.models.length > 0 && shown > 0;
  setText(byId("empty"), narrowed ? "No model is like that." : "There are no models.");
}

byId("loaded").addEventListener("change", filter);

byId("search").addEventListener("input", () => {
  filter();
  if (latest?.searched) poll();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) poll();
});

poll();
