// The models of a platform that decides what is loaded: ModelMesh with what it counts, or SageMaker.

import { EventFeed, eventTable } from "./events.js";
import {
  byId,
  bytes,
  duration,
  fetchJson,
  grid,
  make,
  modelAddress,
  moment,
  plural,
  setText,
} from "./words.js";

/** Rows of each table in the document. */
const MOST_ROWS = 200;
const MOST_EVENTS = 20;

const NOTES = {
  "": "This server is not managed: neither ModelMesh nor SageMaker is enabled.",
  ModelMesh: "ModelMesh controls loading here, based on the memory sizes reported to it.",
  SageMaker: "A SageMaker endpoint controls loading here.",
};

/** The view of the platform; asked for while it is shown. */
export class HostingView {
  #feed = new EventFeed();
  #shown = new Map();

  /** Ask for what is loaded and what has happened, and show it. */
  async update() {
    const [hosting] = await Promise.all([fetchJson("page/hosting"), this.#feed.read()]);
    const { platform, models, model_count: count, loading } = hosting;
    setText(byId("hosting-title"), platform || "Platform");
    const silent = Object.entries(hosting.missing).map(([name, why]) => `worker ${name}: ${why}`);
    setText(byId("hosting-note"), [NOTES[platform] ?? platform, ...silent].join(" "));
    this.#section("hosting-memory", memoryOf(hosting), facts);
    this.#section("hosting-loading", loading.slice(0, MOST_ROWS), loads);
    const told = platform === "ModelMesh";
    const shown = models.slice(0, MOST_ROWS);
    this.#section("hosting-models", { shown, count, told }, modelTable);
    const left = this.#feed.events.filter(
      ({ kind, failed }) => failed || kind === "unload" || kind === "eviction",
    );
    this.#section("hosting-events", left.slice(0, MOST_EVENTS), happened);
  }

  #section(id, content, build) {
    const text = JSON.stringify(content);
    if (this.#shown.get(id) === text) return;
    this.#shown.set(id, text);
    byId(id).replaceChildren(...[build(content)].flat());
  }
}

function memoryOf({ platform, limits, untold_bytes: untold, used_bytes: used, total_bytes: all, models }) {
  const rows = [["Held by models", all === null ? bytes(used) : `${bytes(used)} of ${bytes(all)}`]];
  if (platform !== "ModelMesh") return rows;
  const counted = models.reduce((sum, { told_bytes: told }) => sum + (told ?? 0), 0);
  rows.push(["Counted by the mesh", bytes(counted)], ["Held, not reported yet", bytes(untold)]);
  if (!limits) return [...rows, ["Capacity", "The mesh has not asked yet."]];
  return [
    ...rows,
    ["Reported capacity", bytes(limits.capacity_bytes)],
    ["Concurrent loads", limits.loading_concurrency.toLocaleString("en")],
    ["Load timeout", duration(limits.loading_timeout_ms * 1e6)],
    ["Size of an unknown model", bytes(limits.default_size_bytes)],
  ];
}

function facts(rows) {
  const fact = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  return make("dl", { class: "facts" }, ...rows.map(fact));
}

const link = (name) => make("a", { href: modelAddress(name) }, make("bdi", {}, name));

function loads(list) {
  if (!list.length) return make("p", { class: "quiet" }, "None.");
  const row = ({ name, version, stage }) => [link(name), version, stage];
  return grid("Loads in progress", ["Model", "Version", "Stage"], list.map(row));
}

function modelTable({ shown, count, told }) {
  if (!count) return make("p", { class: "quiet" }, "None.");
  const when = (at) => (at ? moment(at) : "");
  const row = (model) => [
    link(model.name),
    bytes(model.held_bytes),
    told ? (model.told_bytes === null ? "not told" : bytes(model.told_bytes)) : model.url,
    when(model.loaded_at_ns),
  ];
  const heads = ["Model", "Held", told ? "Reported to the mesh" : "From", "Loaded"];
  const more = shown.length < count ? `The largest ${shown.length} of ` : "";
  return [
    grid("Loaded models", heads, shown.map(row)),
    make("p", { class: "quiet" }, `${more}${plural(count, "model")}`),
  ];
}

function happened(events) {
  return events.length ? eventTable(events) : make("p", { class: "quiet" }, "None.");
}
