// The status page: asks for status.json each second and shows what has changed.
//
// Names come from clients: they are only ever set as text, never as HTML.

import { draw } from "./charts.js";
import { EventsView } from "./events.js";
import { Histories } from "./histories.js";
import { HostingView } from "./hosting.js";
import { History } from "./history.js";
import { ModelView } from "./model.js";
import { Overview } from "./overview.js";
import { Session } from "./sign_in.js";
import { Table } from "./table.js";
import { refusal, request } from "./token.js";
import { byId, bytes, digits, duration, moment, plural, setText, uptime } from "./words.js";

const POLL_MILLISECONDS = 1000;
/** With more rows than this they are asked for less often: the server has better to do. */
const MANY_ROWS = 1000;
const MANY_MILLISECONDS = 3000;
const TIMEOUT_MILLISECONDS = 10_000;
const TOTAL_CHART = 40;

// --- the head of the page ---

const totals = new History();
const paths = (chart) => {
  const [first, second] = byId(chart).querySelectorAll("path");
  return { first, second };
};
const rateChart = paths("rate-chart");
const latencyChart = paths("latency-chart");

/** Grey what is old, and offer nothing that nobody would answer. */
function showGone(reason) {
  document.body.toggleAttribute("data-gone", Boolean(reason));
  byId("gone").hidden = !reason;
  if (!reason) return;
  const since = answered === null ? "" : ` since ${moment(answered * 1e6)}`;
  setText(byId("gone"), `No answer${since}: ${reason}. The data below is stale; the page keeps retrying.`);
}

/** An answer that lets the page see nothing. */
class Refused extends Error {}

function showHead({ server, memory, requests, bounds_ns: bounds, now, ...status }) {
  byId("live").title = "";
  pill("live", true, "live");
  pill("ready", server.ready, server.ready ? "ready" : "not ready");
  showMissing(status.missing);
  setText(byId("version"), server.version);
  setText(byId("uptime"), uptime(server.uptime_seconds));
  document.body.dataset.controllable = server.controllable;
  byId("hosting-link").hidden = !server.platform;
  setText(byId("hosting-link"), server.platform ?? "");
  setText(byId("ready-models"), status.ready_models.toLocaleString("en"));
  setText(byId("model-count"), `ready of ${status.model_count.toLocaleString("en")}`);
  setText(byId("fails"), requests.fail ? `${plural(requests.fail, "failed request")}` : "");
  showMemory(memory);
  totals.add(now, requests.success ?? 0, requests.buckets ?? [], bounds);
  showRequests(bounds, now);
}

/** Say which processes of the server have no part in what is shown, and why. */
function showMissing(missing) {
  const reasons = Object.entries(missing).map(([name, reason]) => `${name}: ${reason}`);
  pill("missing", false, `without ${plural(reasons.length, "worker")}`);
  byId("missing").hidden = !reasons.length;
  byId("missing").title = reasons.join("\n");
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

const session = new Session(() => poll());
const histories = new Histories();
const table = new Table({ refresh: () => poll(), histories });
const overview = new Overview();
const view = new ModelView({ refresh: () => poll(), histories });
/** Views beside the overview and a model, by the first part of their address. */
const views = { events: new EventsView(), hosting: new HostingView() };
let place = "overview";
let latest = null;
let timer = 0;
let asking = null;
let remembered = false;
/** The last status, which the server need not send again: where it was asked for, its tag, and when. */
let kept = null;
/** When the server answered last, in milliseconds since 1970. */
let answered = null;

/** Ask for the status and show it; who asks meanwhile waits for the same answer. */
function poll() {
  if (asking === null) {
    const own = ask().finally(() => {
      if (asking !== own) return; // another view was opened meanwhile, and asks for itself
      asking = null;
      clearTimeout(timer);
      if (!document.hidden && !session.asks) {
        const many = place === "overview" && latest?.models.length > MANY_ROWS;
        timer = setTimeout(poll, many ? MANY_MILLISECONDS : POLL_MILLISECONDS);
      }
    });
    asking = own;
  }
  return asking;
}

async function ask() {
  try {
    const asked = place;
    const status = await read(address());
    answered = Date.now();
    session.admit();
    showGone("");
    // Without it charts begin now, and the status is what matters.
    if (!remembered) await remember().catch(() => {});
    for (const model of status.models) histories.add(model, status);
    showHead(status);
    // Asked for another view, which meanwhile is left.
    if (asked !== place) return;
    if (place === "overview") show(status);
    await { overview, model: view, ...views }[place].update(status);
  } catch (error) {
    if (error instanceof Refused) {
      pill("live", true, "live");
      byId("ready").hidden = true;
      showGone("");
      session.ask(error.message);
      return;
    }
    pill("live", false, "no answer");
    byId("ready").hidden = true;
    byId("live").title = error.message;
    showGone(error.message);
  }
}

/** Return the status; one that has not changed is the one that is there, as time goes on. */
async function read(path) {
  const known = kept?.path === path ? kept : null;
  const headers = known ? { "If-None-Match": known.tag } : {};
  const answer = await request(path, { headers, signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS) });
  const at = performance.now();
  let status = known?.status;
  let seconds = known ? known.seconds + (at - known.at) / 1000 : 0;
  if (answer.status !== 304) {
    if (!answer.ok) throw await problem(answer);
    status = await answer.json();
    seconds = status.server.uptime_seconds;
  }
  const tag = answer.headers.get("ETag");
  kept = tag ? { path, tag, status, seconds, at } : null;
  return { ...status, server: { ...status.server, uptime_seconds: seconds }, now: seconds };
}

async function problem(answer) {
  const said = `${answer.status} ${answer.statusText}`;
  const { error = said } = (await answer.json().catch(() => null)) ?? {};
  const refused = refusal(answer.status, error);
  return refused ? new Refused(refused) : new Error(said);
}

/** Take the last two minutes from the server: a page that is loaded again has lost nothing. */
async function remember() {
  remembered = true;
  const answer = await request("history.json", { signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS) });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  const { recent, bounds_ns: bounds } = await answer.json();
  for (const { at_seconds: at, success, buckets, models } of recent) {
    totals.add(at, success, buckets, bounds);
    for (const model of models) {
      histories.add({ ...model, requests: model }, { bounds_ns: bounds, now: at });
    }
  }
}

/** Only where there are more models than the server lists is it asked to search. */
function address() {
  if (view.name !== null) return `status.json?search=${encodeURIComponent(view.name)}`;
  const search = byId("search").value;
  const truncated = latest && (latest.searched || latest.matching > latest.models.length);
  return search && truncated ? `status.json?search=${encodeURIComponent(search)}` : "status.json";
}

function show(status) {
  const searched = latest?.searched ?? false;
  latest = status;
  latest.searched = searched || status.matching > status.models.length;
  filter();
}

function filter() {
  if (!latest) return;
  const text = byId("search").value;
  const only = { loaded: byId("loaded").checked, failed: byId("failed").checked };
  const shown = table.show(latest, text, only);
  const all = plural(latest.matching, "row");
  const narrowed = text || only.loaded || only.failed;
  setText(byId("shown"), narrowed || shown < latest.matching ? `${shown} of ${all}` : "");
  byId("empty").hidden = latest.models.length > 0 && shown > 0;
  setText(byId("empty"), narrowed ? "No matching models." : "No models.");
}

byId("failing-all").addEventListener("click", () => {
  byId("failed").checked = true;
  filter();
  byId("models-title").scrollIntoView();
  byId("failed").focus({ preventScroll: true });
});

for (const id of ["loaded", "failed"]) byId(id).addEventListener("change", filter);

byId("search").addEventListener("input", () => {
  filter();
  if (latest?.searched) poll();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && !session.asks) poll();
});

// --- which view ---

/** Show what the address names: a model, or the overview; anything else is a place within it. */
function route() {
  const [first, kind, name, what, version] = location.hash.split("/");
  if (first !== "#" && first !== "") {
    poll(); // a place within the view that is shown
    return;
  }
  const named = kind === "models" && Boolean(name);
  if (named) view.open(decoded(name), what === "versions" ? decoded(version ?? "") : "");
  else view.close();
  place = named ? "model" : Object.hasOwn(views, kind) ? kind : "overview";
  byId("overview").hidden = place !== "overview";
  byId("model-page").hidden = place !== "model";
  for (const name of Object.keys(views)) byId(`${name}-page`).hidden = place !== name;
  for (const link of document.querySelectorAll(".top nav a[href^='#']")) {
    const is = link.getAttribute("href") === (place === "overview" ? "#/" : `#/${place}`);
    link.toggleAttribute("aria-current", is);
    if (is) link.setAttribute("aria-current", "page");
  }
  const title = named ? view.name : views[place] && byId(`${place}-title`).textContent;
  document.title = title ? `${title} – xlaserve` : "xlaserve";
  asking = null; // what is on its way was asked for the other view
  poll();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // as somebody typed it
  }
}

window.addEventListener("hashchange", () => {
  route();
  if (!location.hash.startsWith("#/")) return;
  scrollTo(0, 0);
  byId("content").focus({ preventScroll: true });
});

route();
