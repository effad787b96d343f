// What happened: rates, failures and percentiles over five minutes or an hour, and memory.

import { errors } from "./model.js";
import { isFailed } from "./table.js";
import {
  byId,
  bytes,
  digits,
  duration,
  fetchJson,
  make,
  modelAddress,
  percent,
  plural,
  setText,
} from "./words.js";

const REFRESH_MILLISECONDS = 10_000;
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [480, 130];
const AXIS = { left: 58, right: 6, top: 8, bottom: 20 };

/** Tiles of the treemap; what is smaller is one tile together. */
const MOST_TILES = 24;

/** The least part of all that has a tile of its own: a smaller one could not be read. */
const LEAST_TILE = 1 / 50;

/** Models that are named with why they failed, above everything. */
const MOST_FAILED = 5;

/** Models that are named with how many of their executions wait. */
const MOST_QUEUES = 5;

/** The part of the overview that looks back; asked for while it is shown. */
export class Overview {
  #asked = -Infinity;
  #answer = null;
  #tiles = "";
  #waiting = "";
  #failing = "";

  constructor() {
    byId("window").addEventListener("change", () => this.#draw());
  }

  /** Show it beside a status; the history is asked for again where it is old. */
  async update(status) {
    this.#failures(status);
    this.#treemap(status);
    this.#queues(status);
    if (performance.now() - this.#asked < REFRESH_MILLISECONDS) return;
    this.#asked = performance.now();
    try {
      this.#answer = await fetchJson("history.json");
    } catch {
      return; // the status says already that there is no answer
    }
    this.#draw();
  }

  #draw() {
    if (!this.#answer) return;
    const { now_seconds: now, hour, errors: last } = this.#answer;
    const seconds = Number(byId("window").value);
    const shown = hour.filter((interval) => interval.at_seconds > now - seconds);
    const axes = { now, seconds, none: "No requests in this period." };
    const rate = [["rate", (one) => one.requests_per_second]];
    byId("over-rate").replaceChildren(lines("Requests per second", shown, rate, digits, axes));
    const latency = [
      ["p50", (one) => one.p50_ns],
      ["p99", (one) => one.p99_ns],
    ];
    byId("over-latency").replaceChildren(lines("Latency", shown, latency, duration, axes));
    const lag = [
      ["mean", (one) => inNanoseconds(one.lag_mean_seconds)],
      ["p99", (one) => inNanoseconds(one.lag_p99_seconds)],
    ];
    const looks = { ...axes, none: "No data for this period." };
    byId("over-lag").replaceChildren(lines("Event loop lag", shown, lag, duration, looks));
    const waited = { ...axes, none: "Nothing was queued at the samples of this period." };
    const queue = [["waiting", (one) => one.pending]];
    byId("over-queue").replaceChildren(lines("Queued executions", shown, queue, digits, waited));
    byId("over-reasons").replaceChildren(reasons(shown));
    byId("over-errors").replaceChildren(...errors(last.slice(0, 8), true));
  }

  /** Say first which models failed, and why: nobody looks for them in a list of hundreds. */
  #failures({ models }) {
    const failed = models.filter(isFailed);
    byId("failing").hidden = !failed.length;
    const shown = failed.slice(0, MOST_FAILED);
    const drawn = JSON.stringify(shown.map(({ name, version, reason }) => [name, version, reason]));
    setText(byId("failing-title"), `${plural(failed.length, "model")} failed`);
    byId("failing-more").hidden = shown.length === failed.length;
    if (drawn === this.#failing) return;
    this.#failing = drawn;
    const item = ({ name, version, reason }) =>
      make(
        "li",
        {},
        make("a", { href: modelAddress(name) }, make("bdi", {}, name)),
        version ? ` ${version}` : "",
        make("br"),
        reason || "No reason given.",
      );
    byId("failing-list").replaceChildren(...shown.map(item));
  }

  /** Name the models with the longest queues now. */
  #queues({ models }) {
    const queues = models.filter(({ pending }) => pending).map(({ name, pending }) => [name, pending]);
    queues.sort(([, one], [, other]) => other - one);
    const named = queues.slice(0, MOST_QUEUES);
    const text = JSON.stringify(named);
    if (text === this.#waiting) return;
    this.#waiting = text;
    const link = ([name, pending], at) => [
      at ? ", " : "Now: ",
      make("a", { href: modelAddress(name) }, make("bdi", {}, name)),
      ` ${pending.toLocaleString("en")}`,
    ];
    byId("over-waiting").replaceChildren(...named.flatMap(link));
    if (!named.length) setText(byId("over-waiting"), "Nothing is queued.");
  }

  /** Draw memory by model, each tile as large as its part. */
  #treemap({ models, memory: { used_bytes: used, total_bytes: total } }) {
    const sizes = new Map();
    for (const { name, size_bytes: size } of models) {
      if (size) sizes.set(name, (sizes.get(name) ?? 0) + size);
    }
    const text = JSON.stringify([[...sizes], used, total]);
    if (text === this.#tiles) return;
    this.#tiles = text;
    const sorted = [...sizes].sort(([, one], [, other]) => other - one);
    const all = sorted.reduce((sum, [, size]) => sum + size, 0);
    const small = sorted.findIndex(([, size]) => size < LEAST_TILE * all);
    const shown = Math.min(small < 0 ? sorted.length : small, MOST_TILES);
    const tiles = sorted.slice(0, shown).map(([name, size]) => ({ name, size }));
    const rest = sorted.slice(shown);
    const left = rest.reduce((sum, [, size]) => sum + size, 0);
    if (left) tiles.push({ label: plural(rest.length, shown ? "smaller model" : "model"), size: left });
    byId("over-memory").replaceChildren(
      tiles.length ? treemap(tiles) : make("p", { class: "quiet" }, "No model is loaded."),
      make("p", { class: "quiet" }, memoryWords(used, total)),
    );
  }
}

function memoryWords(used, total) {
  if (total === null) return `${bytes(used)} are held.`;
  const free = Math.max(0, total - used);
  return `${bytes(used)} are held, ${bytes(free)} of ${bytes(total)} are free (${percent(free / total)}).`;
}

function svgOf(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Draw series over time, with a scale that can be read. */
function lines(title, intervals, series, words, { now, seconds, none }) {
  const known = intervals.some((one) => series.some(([, read]) => read(one)));
  if (!known) return make("p", { class: "quiet" }, none);
  const values = intervals.flatMap((one) => series.map(([, read]) => read(one) ?? 0));
  const top = round(Math.max(...values, 0)) || 1;
  const x = (at) => AXIS.left + (WIDTH - AXIS.left - AXIS.right) * (1 - (now - at) / seconds);
  const y = (value) => HEIGHT - AXIS.bottom - (HEIGHT - AXIS.top - AXIS.bottom) * (value / top);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top).toFixed(1);
    parts.push(svgOf("line", { class: "rule", x1: AXIS.left, x2: WIDTH - AXIS.right, y1: at, y2: at }));
    const label = { class: "tick", x: AXIS.left - 6, y: Number(at) + 4, "text-anchor": "end" };
    parts.push(svgOf("text", label, words(share * top)));
  }
  for (const share of [0, 0.5, 1]) {
    const anchor = ["start", "middle", "end"][2 * share];
    const at = AXIS.left + share * (WIDTH - AXIS.left - AXIS.right);
    const minutes = (seconds * (1 - share)) / 60;
    const said = minutes ? `−${digits(minutes)} min` : "now";
    parts.push(svgOf("text", { class: "tick", x: at, y: HEIGHT - 4, "text-anchor": anchor }, said));
  }
  for (const [name, read] of series) {
    const path = paths(intervals, read, x, y);
    parts.push(svgOf("path", { class: name === "p99" ? "line second" : "line", d: path }));
  }
  const most = series.map(([name, read]) => {
    const found = intervals.map(read).filter((value) => value !== null);
    return `${name} at most ${found.length ? words(Math.max(...found)) : "–"}`;
  });
  const label = `${title} of the last ${seconds / 60} minutes: ${most.join(", ")}`;
  return svgOf("svg", { class: "axes", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, ...parts);
}

function inNanoseconds(seconds) {
  return seconds === null ? null : seconds * 1e9;
}

/** Return a path with a gap where there is no value. */
function paths(intervals, read, x, y) {
  let [path, joined] = ["", false];
  for (const interval of intervals) {
    const value = read(interval);
    if (value === null) {
      joined = false;
      continue;
    }
    const point = `${x(interval.at_seconds).toFixed(1)} ${y(value).toFixed(1)}`;
    path += joined ? `L${point}` : `M${point}L${point}`;
    joined = true;
  }
  return path;
}

/** Return the least of 1, 2, 5, 10... that is not smaller. */
function round(value) {
  if (!value) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

function reasons(intervals) {
  const counts = new Map();
  for (const { failures } of intervals) {
    for (const [reason, count] of Object.entries(failures)) {
      counts.set(reason, (counts.get(reason) ?? 0) + count);
    }
  }
  if (!counts.size) return make("p", { class: "quiet" }, "None in this period.");
  const sorted = [...counts].sort(([, one], [, other]) => other - one);
  const item = ([reason, count]) => make("li", {}, `${reason}: ${count.toLocaleString("en")}`);
  return make("ul", {}, ...sorted.map(item));
}

/** Lay tiles out, each rectangle cut in two of about the same size, again and again. */
function treemap(tiles) {
  const map = make("div", { class: "treemap" });
  const lay = (some, left, top, width, height) => {
    if (some.length === 1) {
      map.append(tile(some[0], left, top, width, height));
      return;
    }
    const all = some.reduce((sum, { size }) => sum + size, 0);
    let [cut, first] = [1, some[0].size];
    while (cut < some.length - 1 && first + some[cut].size / 2 < all / 2) first += some[cut++].size;
    const share = first / all;
    // The map is about three times as wide as it is high.
    if (3 * width >= height) {
      lay(some.slice(0, cut), left, top, width * share, height);
      lay(some.slice(cut), left + width * share, top, width * (1 - share), height);
    } else {
      lay(some.slice(0, cut), left, top, width, height * share);
      lay(some.slice(cut), left, top + height * share, width, height * (1 - share));
    }
  };
  lay(tiles, 0, 0, 100, 100);
  return map;
}

function tile({ name, label, size }, left, top, width, height) {
  const words = `${label ?? name}, ${bytes(size)}`;
  const shown = [make("bdi", {}, label ?? name), make("br"), bytes(size)];
  const element = name
    ? make("a", { class: "tile", href: modelAddress(name), title: words }, ...shown)
    : make("span", { class: "tile", title: words }, ...shown);
  const places = { left, top, width, height };
  for (const [side, value] of Object.entries(places)) element.style[side] = `${value}%`;
  return element;
}
