// Words for numbers, and small parts of pages. Whatever names hold, they are set as text only.

import { request } from "./token.js";

export const byId = (id) => document.getElementById(id);

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(size) {
  const power = size ? Math.min(Math.floor(Math.log2(size) / 10), UNITS.length - 1) : 0;
  return `${digits(size / 1024 ** power)} ${UNITS[power]}`;
}

export function digits(value) {
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? 1 : 2);
}

export function duration(ns) {
  if (ns === null) return "–";
  if (ns < 1e6) return `${digits(Math.round(ns / 1e3))} µs`;
  return ns < 1e9 ? `${digits(ns / 1e6)} ms` : `${digits(ns / 1e9)} s`;
}

export function uptime(seconds) {
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

const TIME = {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
  timeZoneName: "short",
};

/** Write a time since 1970 in nanoseconds, the same way everywhere: `Nov 27, 17:23:01 GMT+1`. */
export function moment(ns) {
  return new Date(ns / 1e6).toLocaleString("en", TIME);
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

export function percent(share) {
  return `${digits(100 * share)} %`;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make an element; attributes that are null or false are left out, children are nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Make a table from its captions and rows; a cell is a node or text, a number is right-aligned. */
export function grid(caption, heads, rows) {
  const cell = (value) =>
    typeof value === "number" ? make("td", { class: "right" }, digits(value)) : make("td", {}, value);
  return make(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": caption },
    make(
      "table",
      { class: "grid" },
      make("caption", { class: "hidden-text" }, caption),
      make("thead", {}, make("tr", {}, ...heads.map((h) => make("th", { scope: "col" }, h)))),
      make(
        "tbody",
        {},
        ...rows.map(([head, ...cells]) =>
          make("tr", {}, make("th", { scope: "row" }, head), ...cells.map(cell)),
        ),
      ),
    ),
  );
}

/** Fetch JSON; throws an error with the text that the server gave. */
export async function fetchJson(path, options = {}) {
  const answer = await request(path, options);
  const body = await answer.json().catch(() => null);
  if (answer.ok) return body;
  throw new Error(body?.error ?? `${answer.status} ${answer.statusText}`);
}

export function modelAddress(name, ...more) {
  return ["#/models", name, ...more].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");
}

const MOST_PROBLEMS = 5;

/** Show a notice until it is dismissed; `action` is a button beside it: its label, and what it does. */
export function report(text, action = null) {
  const problem = make("p", { class: action ? "notice done" : "notice" }, make("span", {}, text));
  const dismiss = () => problem.remove();
  if (action) {
    const [label, act] = action;
    const pressed = () => {
      dismiss();
      act();
    };
    problem.append(make("button", { type: "button", onclick: pressed }, label));
  }
  problem.append(make("button", { type: "button", onclick: dismiss }, "Dismiss"));
  byId("problems").append(problem);
  while (byId("problems").children.length > MOST_PROBLEMS) byId("problems").firstChild.remove();
}
