// The events of the server: what changed or failed, when, and who asked for it.

import { byId, fetchJson, grid, make, modelAddress, moment, plural, setText } from "./words.js";

/** Rows in the document; older ones are found by a search. */
const MOST_ROWS = 200;

const DONE = {
  load: "Loaded",
  reload: "Reloaded",
  unload: "Unloaded",
  eviction: "Evicted",
  "read again": "Files reloaded",
  "worker started": "Worker started",
  "worker died": "Worker died",
};
const FAILED = {
  load: "Load failed",
  reload: "Reload failed",
  "read again": "File reload failed",
  "worker died": "Worker died",
};
const CAUSES = {
  start: "server startup",
  repository: "changed repository files",
  files: "files of the server",
  "other worker": "another worker",
};

/** All events that the server keeps; those that are known are not asked for again. */
export class EventFeed {
  log = "";
  events = [];
  limited = false;
  dropped = 0;

  /** Ask for what has happened since. */
  async read() {
    const last = this.events[0]?.number ?? 0;
    let answer = await fetchJson(`page/events?after=${last}`);
    if (answer.log !== this.log) {
      // Another log: its numbers began anew.
      if (last) answer = await fetchJson("page/events");
      this.events = [];
    }
    this.log = answer.log;
    this.limited = answer.limited;
    this.dropped = answer.dropped;
    this.events = [...answer.events, ...this.events].filter(({ number }) => number >= answer.first);
  }
}

/** The view of all events. */
export class EventsView {
  #feed = new EventFeed();
  #shown = "";

  constructor() {
    for (const [id, event] of [["events-search", "input"], ["events-failed", "change"]]) {
      byId(id).addEventListener(event, () => this.#draw());
    }
  }

  /** Ask for what has happened since, and show it. */
  async update() {
    await this.#feed.read();
    this.#draw();
  }

  #draw() {
    const { log, events, limited, dropped } = this.#feed;
    const needle = byId("events-search").value.toLowerCase();
    const failed = byId("events-failed").checked;
    const found = events.filter(
      (event) => (event.failed || !failed) && (!needle || wordsOf(event).includes(needle)),
    );
    const shown = found.slice(0, MOST_ROWS);
    const said = shown.length < found.length ? `the last ${shown.length} of ` : "";
    setText(byId("events-shown"), `${said}${plural(found.length, "event")}`);
    const notes = [];
    if (limited) notes.push("Only models whose metadata you may read.");
    if (dropped) notes.push(`${plural(dropped, "older event")} were dropped.`);
    setText(byId("events-note"), notes.join(" "));
    const text = JSON.stringify([log, shown.map(({ number }) => number)]);
    if (text === this.#shown) return;
    this.#shown = text;
    const none = needle || failed ? "No matching events." : "No events yet.";
    byId("events-list").replaceChildren(
      shown.length ? eventTable(shown) : make("p", { class: "empty quiet" }, none),
    );
  }
}

/** Return a table of events; `ofOne` leaves out the model, which is that of the page. */
export function eventTable(events, ofOne = false) {
  const row = (event) => [
    moment(event.at_ns),
    make("span", { class: event.failed ? "bad" : null }, whatOf(event)),
    ...(ofOne ? [] : [subjectOf(event)]),
    detailsOf(event),
    whoOf(event),
  ];
  const heads = ["When", "What", ...(ofOne ? [] : ["Model"]), "Details", "Asked by"];
  return grid("Events", heads, events.map(row));
}

function whatOf({ kind, failed }) {
  return (failed ? FAILED : DONE)[kind] ?? kind;
}

function subjectOf({ model, subject = "", worker = null, kind }) {
  if (model) return make("a", { href: modelAddress(model) }, make("bdi", {}, model));
  return subject || (kind.startsWith("worker") ? `worker ${worker}` : "");
}

function detailsOf({ kind, version, text, for_model: needed, worker = null }) {
  const parts = [];
  if (version) parts.push(`version ${version}`);
  if (needed) parts.push(`for “${needed}”`);
  if (text) parts.push(text);
  if (worker !== null && !kind.startsWith("worker")) parts.push(`worker ${worker}`);
  return parts.join(" · ");
}

/** Say who asked for something, or why it was done where nobody did. */
export function whoOf({ asker = {}, cause = "" }) {
  const { principal = "", peer = "", protocol = "" } = asker;
  return [principal, peer, protocol].filter(Boolean).join(", ") || (CAUSES[cause] ?? "");
}

function wordsOf(event) {
  const { model = "", subject = "" } = event;
  return [whatOf(event), model, subject, detailsOf(event), whoOf(event)].join("\n").toLowerCase();
}
