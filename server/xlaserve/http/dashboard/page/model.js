// The page of a model: asks for it each second and replaces the sections that have changed.

import { draw } from "./charts.js";
import { Chat } from "./chat.js";
import { ask, labelOf, progressOf } from "./control.js";
import { eventTable, whoOf } from "./events.js";
import { TryIt } from "./try.js";
import {
  byId,
  bytes,
  digits,
  duration,
  fetchJson,
  grid,
  make,
  modelAddress,
  moment,
  percent,
  plural,
  setText,
} from "./words.js";

const CHART = 40;
const MOST_EVENTS = 20;
const ROWS = {
  proved: "Rows are independent: the analysis of the program proved it.",
  declared: "Rows are declared independent by the configuration; a trial found no dependence.",
  mixed: "Rows depend on one another.",
  unknown: "Rows are not known to be independent.",
  "": "Row independence was not analyzed: the first dimension is fixed, or this is not a JAX program.",
};

/** One model, in the part of the document that is its own. */
export class ModelView {
  name = null;
  #version = "";
  #shown = new Map();
  #busy = "";
  #config = "";
  #events = "";
  #latest = null;
  #try = new TryIt();
  #chat = new Chat();

  constructor({ refresh, histories }) {
    this.refresh = refresh;
    this.histories = histories;
    for (const button of byId("model-actions").querySelectorAll("button")) {
      button.addEventListener("click", () => this.#act(button.dataset.verb));
    }
  }

  /** Show another model, or another version of it; nothing of the one before stays. */
  open(name, version) {
    if (this.name === name && this.#version === version) return;
    this.name = name;
    this.#version = version;
    this.#latest = null;
    this.#shown.clear();
    this.#config = "";
    this.#events = "";
    for (const id of SECTIONS) byId(id).replaceChildren();
    for (const id of ["model-state", "model-about", "model-problem"]) setText(byId(id), "");
    for (const path of byId("model-page").querySelectorAll("path")) path.setAttribute("d", "");
    byId("model-facts").hidden = true;
    byId("model-versions").hidden = true;
    setText(byId("model-name"), name);
    byId("try").hidden = true;
    this.#try.clear();
    this.#chat.clear();
    this.#offer();
  }

  close() {
    this.name = null;
    this.#try.clear();
    this.#chat.clear();
  }

  /** Ask for the model and show it beside the status that was just read. */
  async update(status) {
    const name = this.name;
    try {
      const model = await fetchJson(`page/models/${encodeURIComponent(name)}`);
      if (name === this.name) this.#show(model, status);
    } catch (error) {
      if (name === this.name) setText(byId("model-problem"), error.message);
    }
  }

  #show(model, status) {
    this.#latest = { model, status };
    setText(byId("model-problem"), "");
    const version = this.#chosen(model);
    byId("model-page").dataset.state = version?.state ?? "UNAVAILABLE";
    setText(byId("model-state"), version?.state ?? "UNAVAILABLE");
    setText(byId("model-about"), version ? about(version) : model.reason);
    this.#versions(model, version);
    this.#offer();
    byId("model-facts").hidden = !version;
    if (!version) return;
    const loaded = version.loaded;
    this.#section("model-tensors", [loaded?.inputs, loaded?.outputs], () => tensors(loaded));
    this.#section("model-independence", loaded && [loaded.rows, loaded.max_batch_size], () => rows(loaded));
    this.#section("model-buckets", buckets(version), (facts) => bucketGrid(facts));
    this.#section("model-memory", loaded && [loaded.memory, loaded.devices], () => memory(loaded));
    const counts = [version, model.in_progress];
    this.#section("model-statistics", counts, () => statistics(version, model));
    this.#section("model-depends", [model.dependents, loaded?.steps], () => depends(model, loaded));
    this.#section("model-errors", model.errors, () => errors(model.errors));
    this.#chat.update(model, version);
    this.#tryIt(model, version);
    this.#charts(version, status);
    this.#configure(model, version);
    this.#happened(model);
  }

  /** Ask for the events of the model once for each change of it. */
  async #happened({ name, versions }) {
    const counts = versions.map((one) => [one.loads, one.load_failures, one.unloads, one.reason]);
    const key = JSON.stringify([name, counts]);
    if (this.#events === key) return;
    this.#events = key;
    try {
      const { events } = await fetchJson(`page/events?model=${encodeURIComponent(name)}`);
      if (this.#events === key) {
        const facts = events.length ? events.slice(0, MOST_EVENTS) : null;
        this.#section("model-events", facts, () => eventTable(facts, true));
      }
    } catch {
      this.#events = ""; // asked for again with the next look at the model
    }
  }

  #chosen({ versions }) {
    const asked = versions.find((one) => one.version === this.#version);
    const ready = versions.filter((one) => one.state === "READY").at(-1);
    return asked ?? ready ?? versions.at(-1);
  }

  /** Replace a section whose facts are not those that it shows; one without facts is hidden. */
  #section(id, facts, build) {
    const text = JSON.stringify(facts ?? null);
    if (this.#shown.get(id) === text) return;
    this.#shown.set(id, text);
    const parent = byId(id);
    parent.closest("section").hidden = facts == null;
    parent.replaceChildren(...(facts == null ? [] : [build(facts)].flat()));
  }

  #versions(model, chosen) {
    byId("model-versions").hidden = model.versions.length < 2;
    const facts = [model.versions.map((one) => [one.version, one.state, one.reason]), chosen?.version];
    const text = JSON.stringify(facts);
    if (this.#shown.get("versions") === text) return;
    this.#shown.set("versions", text);
    byId("model-versions").replaceChildren(
      ...model.versions.map((one) =>
        make(
          "a",
          {
            href: modelAddress(model.name, "versions", one.version),
            "aria-current": one === chosen ? "page" : null,
          },
          `Version ${one.version}, ${one.state}`,
        ),
      ),
    );
  }

  /** Offer a form to who may infer, and keep it as long as the tensors are the same. */
  #tryIt({ name, may, grpc_endpoint: grpc }, { version, state, loaded }) {
    byId("try").hidden = !may.infer || state !== "READY";
    if (byId("try").hidden) return;
    const facts = JSON.stringify([version, loaded.inputs, loaded.outputs, grpc]);
    if (this.#shown.get("try") === facts) return;
    this.#shown.set("try", facts);
    this.#try.show(name, version, loaded, grpc);
  }

  #charts(version, { bounds_ns: bounds, now }) {
    const history = this.histories.of(this.name, version.version);
    if (!history) return;
    const { rate, p50, p99 } = history.recent(bounds);
    setText(byId("model-rate"), `${digits(rate ?? 0)}/s`);
    setText(byId("model-latency"), p50 === null ? "–" : `${duration(p50)}, ${duration(p99)}`);
    const path = (name) => byId("model-page").querySelector(name);
    draw(history, "rate", {
      line: path(".rate-line"),
      area: path(".rate-area"),
      height: CHART,
      top: history.top("rate"),
      now,
    });
    for (const key of ["p50", "p99"]) {
      draw(history, key, { line: path(`.${key}-line`), height: CHART, top: history.top("p99"), now });
    }
  }

  /** Ask for the configuration once for each load; who may not see it is told so. */
  async #configure(model, version) {
    const key = JSON.stringify([model.name, version.version, version.loads, version.state]);
    if (this.#config === key) return;
    this.#config = key;
    const shown = byId("model-config");
    if (!model.may.metadata) {
      setText(shown, "You lack permission to see its configuration.");
      return;
    }
    if (version.state !== "READY") {
      setText(shown, "Available while the model is ready.");
      return;
    }
    const name = encodeURIComponent(model.name);
    try {
      const config = await fetchJson(`v2/models/${name}/versions/${version.version}/config`);
      if (this.#config === key) setText(shown, JSON.stringify(withoutEmpty(config), null, 2));
    } catch (error) {
      if (this.#config === key) setText(shown, error.message);
    }
  }

  #offer() {
    const model = this.#latest?.model;
    const loaded = model?.versions.some((one) => one.loaded) ?? false;
    byId("model-actions").hidden = !model?.may.manage;
    for (const button of byId("model-actions").querySelectorAll("button")) {
      const { verb } = button.dataset;
      const busy = this.#busy === verb;
      button.hidden = !busy && (verb === "load") === loaded;
      setText(button, busy ? progressOf(verb) : labelOf(verb));
      button.setAttribute("aria-disabled", String(Boolean(this.#busy)));
    }
  }

  async #act(verb) {
    const name = this.name;
    if (this.#busy || !this.#latest) return;
    this.#busy = verb;
    this.#offer();
    try {
      await ask(verb, name, this.#latest.status.memory, this.refresh);
    } finally {
      this.#busy = "";
      this.#offer();
    }
  }
}

const SECTIONS = [
  "model-tensors",
  "model-independence",
  "model-buckets",
  "model-memory",
  "model-statistics",
  "model-depends",
  "model-errors",
  "model-events",
  "model-config",
];

function about(version) {
  const kinds = [];
  if (version.loaded?.platform) kinds.push(version.loaded.platform);
  if (version.loaded?.decoupled) kinds.push("many answers to a request");
  if (version.loaded?.sequences) kinds.push("sequences");
  if (version.reason) kinds.push(version.reason);
  return [`version ${version.version}`, ...kinds].join(" · ");
}

function tensors({ inputs, outputs }) {
  const row = ({ name, datatype, shape, parameters = {} }) => [
    name,
    datatype,
    `[${shape.join(", ")}]`,
    Object.entries(parameters)
      .map(([key, value]) => `${key}: ${value.length > 60 ? `${value.slice(0, 60)}…` : value}`)
      .join(", "),
  ];
  const heads = ["Name", "Datatype", "Shape", "Parameters"];
  return [
    make("h4", {}, "Inputs"),
    grid("Inputs", heads, inputs.map(row)),
    make("h4", {}, "Outputs"),
    grid("Outputs", heads, outputs.map(row)),
  ];
}

function rows({ rows: { independence, by, text, notice }, max_batch_size: most }) {
  const verdict = by === "declaration" ? ROWS.declared : ROWS[independence];
  const batch = most ? `Requests have up to ${plural(most, "row")}.` : "";
  return [verdict, independence === "proved" ? "" : text, notice, batch]
    .filter(Boolean)
    .map((said) => make("p", {}, said));
}

/** Return what is known of each bucket, and how much of what was computed was padding. */
function buckets({ loaded, statistics: { compile_stats: compiled }, ...version }) {
  if (!loaded || !compiled.length) return null;
  const { bucket_executions: executions, executed_rows: all, padding_rows: padding } = version;
  return { compiled, executions, all, padding, programs: loaded.programs };
}

function bucketGrid({ compiled, executions, all, padding, programs }) {
  const named = compiled.map(({ batch_size: size, sizes, compile_ns: compile, execution_ns: run }) => [
    size ? `${size}${sizes.length ? ` × ${sizes.join(" × ")}` : ""}` : "any",
    duration(compile),
    run ? duration(run) : "–",
    executions[size] ?? 0,
  ]);
  const { compiled: own, cached, shared, on_demand: late } = programs;
  const waste = all ? `${percent(padding / all)} of the rows that were computed were padding. ` : "";
  const from = `${plural(own, "program")} compiled, ${cached} from the cache, ${shared} shared, ${late} on demand.`;
  return [
    grid("Buckets", ["Rows", "Compilation", "One execution", "Executions"], named),
    make("p", { class: "quiet" }, waste + from),
  ];
}

function memory({ memory: parts, devices }) {
  const row = ([name, size]) => [name, bytes(size)];
  const held = Object.entries(parts).filter(([, size]) => size);
  return [
    make("h4", {}, "By part"),
    grid("Memory by part", ["Part", "Bytes"], held.map(row)),
    make("h4", {}, "By device"),
    grid("Memory by device", ["Device", "Bytes"], Object.entries(devices).map(row)),
  ];
}

function statistics(version, { in_progress: inProgress }) {
  const { inference_stats: stats, inference_count: rows, execution_count: runs } = version.statistics;
  const { success, fail } = stats;
  const mean = ({ count, ns }) => (count ? duration(ns / count) : "–");
  const facts = [
    ["Answered", success.count.toLocaleString("en")],
    ["Failed", [fail.count.toLocaleString("en"), ...reasons(version.failures)].join(", ")],
    ["In progress", inProgress.toLocaleString("en")],
    ["Waiting", (version.loaded?.pending ?? 0).toLocaleString("en")],
    ["Rows, executions", `${rows.toLocaleString("en")}, ${runs.toLocaleString("en")}`],
    ["Mean time", mean(success)],
    ["queued", mean(stats.queue)],
    ["computing", mean(stats.compute_infer)],
    ["Loads, failed, unloads", `${version.loads}, ${version.load_failures}, ${version.unloads}`],
    ["Last load", version.loads ? duration(version.load_seconds * 1e9) : "–"],
    ["Loaded", loadedBy(version)],
    ["Last inference", when(version.statistics.last_inference)],
  ];
  return make(
    "dl",
    {},
    ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
}

function reasons(failures) {
  return Object.entries(failures).map(([reason, count]) => `${count} ${reason}`);
}

function loadedBy({ origin }) {
  if (!origin) return "never";
  const who = whoOf(origin);
  return moment(origin.at_ns) + (who ? `, asked by ${who}` : "");
}

function when(milliseconds) {
  return milliseconds ? moment(milliseconds * 1e6) : "never";
}

function depends({ dependents }, loaded) {
  const links = (names) =>
    names.flatMap((name, at) => [
      ...(at ? [", "] : []),
      make("a", { href: modelAddress(name) }, make("bdi", {}, name)),
    ]);
  const said = [];
  if (dependents.length) said.push(make("p", {}, "Used by ensembles: ", ...links(dependents)));
  if (loaded?.steps.length) said.push(make("p", {}, "Steps: ", ...links(loaded.steps)));
  return said.length ? said : [make("p", { class: "quiet" }, "Not used by an ensemble.")];
}

/** Return a table of errors, with their models where they are of several. */
export function errors(list, ofSeveral = false) {
  if (!list.length) return [make("p", { class: "quiet" }, "None among the server's last 50.")];
  const link = (name) => (name ? make("a", { href: modelAddress(name) }, make("bdi", {}, name)) : "");
  const row = ({ at_ns: at, reason, operation, model, text }) => [
    moment(at),
    reason,
    ...(ofSeveral ? [link(model)] : []),
    operation,
    text,
  ];
  const heads = ["When", "Reason", ...(ofSeveral ? ["Model"] : []), "Operation", "Text"];
  return [grid("Errors", heads, list.map(row))];
}

/** Leave out what a configuration does not say: Triton's has every field. */
function withoutEmpty(value) {
  if (Array.isArray(value)) return value.map(withoutEmpty);
  if (value === null || typeof value !== "object") return value;
  const said = Object.entries(value).map(([name, each]) => [name, withoutEmpty(each)]);
  return Object.fromEntries(said.filter(([, each]) => !isEmpty(each)));
}

function isEmpty(value) {
  if (value === null || value === "" || value === 0 || value === false) return true;
  return typeof value === "object" && !Object.keys(value).length;
}
