// The outputs of an inference: as a table, a chart, an image, or labels.

import { grid, make } from "./words.js";

const MOST_ROWS = 100;
const MOST_CELLS = 20;
const MOST_LABELS = 5;
const MOST_POINTS = 4096;
const SVG = "http://www.w3.org/2000/svg";

/** Read JSON whose numbers may be none that JavaScript has: these stay text, exact. */
export function readAnswer(text) {
  const token = /"(?:[^"\\]|\\.)*"|-?\d{16,}(?![\d.eE])|-?Infinity|NaN/g;
  const exact = (found) => (found[0] === '"' ? found : `"${found}"`);
  return JSON.parse(text.replace(token, exact));
}

/** Return an output, in the form that fits it, with a choice of the others. */
export function output(tensor, metadata) {
  const { name, datatype, shape, data = [] } = tensor;
  const forms = formsOf(tensor, metadata);
  const shown = make("div", {});
  const show = (form) => shown.replaceChildren(forms[form]());
  const choices = Object.keys(forms).map((form) => make("option", { value: form }, form));
  const choice = make("select", { "aria-label": `Show ${name} as` }, ...choices);
  choice.addEventListener("change", () => show(choice.value));
  show(choice.value);
  const words = `${datatype} [${shape.join(", ")}], ${data.length.toLocaleString("en")} elements`;
  return make(
    "section",
    { class: "output" },
    make("h4", {}, make("bdi", {}, name), " ", make("span", { class: "quiet" }, words), " ", choice),
    shown,
  );
}

function formsOf({ name, datatype, shape, data = [] }, metadata) {
  const width = shape.length > 1 ? shape.at(-1) : data.length;
  const numbers = datatype !== "BYTES" && datatype !== "BOOL" && data.length > 1;
  const forms = {};
  const labels = labelsOf(metadata);
  if (labels?.length === width) forms.labels = () => best(name, data.slice(0, width), labels);
  const picture = numbers && pictureOf(shape);
  if (picture) forms.image = () => image(name, data, picture);
  forms.table = () => table(name, shape, data, width || 1);
  if (numbers && data.length <= MOST_POINTS) forms.chart = () => chart(name, data);
  return forms;
}

function labelsOf(metadata) {
  try {
    return JSON.parse(metadata?.parameters?.labels ?? "null");
  } catch {
    return null;
  }
}

function best(name, scores, labels) {
  const order = [...scores.keys()].sort((one, other) => scores[other] - scores[one]);
  const row = (at) => [labels[at], String(scores[at]), bar(scores[at], scores[order[0]])];
  return grid(name, ["Label", "Score", ""], order.slice(0, MOST_LABELS).map(row));
}

function bar(value, most) {
  return make("meter", { max: Math.abs(most) || 1, value: Math.max(0, value), "aria-hidden": "true" });
}

function table(name, shape, data, width) {
  const rows = [];
  for (let at = 0; at < data.length && rows.length < MOST_ROWS; at += width) {
    const cells = data.slice(at, at + Math.min(width, MOST_CELLS)).map(String);
    if (width > MOST_CELLS) cells.push(`… ${width - MOST_CELLS} more`);
    rows.push([String(at / width), ...cells]);
  }
  const heads = ["Row", ...Array.from({ length: (rows[0]?.length ?? 1) - 1 }, (_, at) => String(at))];
  const more = Math.ceil(data.length / width) - rows.length;
  const cut = more > 0 ? make("p", { class: "quiet" }, `${more} more rows`) : "";
  return make("div", {}, grid(name, heads, rows), cut);
}

function chart(name, data) {
  const values = data.map(Number);
  const finite = values.filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite)];
  const y = (value) => (high === low ? 40 : 78 - (76 * (value - low)) / (high - low));
  const x = (at) => (values.length > 1 ? (at * 240) / (values.length - 1) : 0);
  const points = values.map((v, at) => [x(at), y(v)]).filter(([, v]) => Number.isFinite(v));
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("class", "line");
  path.setAttribute("d", `M${points.map((point) => point.map((n) => n.toFixed(1)).join(" ")).join("L")}`);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 240 80");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "chart");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${values.length} values from ${low} to ${high}`);
  svg.append(path);
  const ends = [`0 … ${values.length - 1}`, `${low} … ${high}`];
  return make("div", {}, svg, make("p", { class: "axis" }, ...ends.map((t) => make("span", {}, t))));
}

/** Return height, width and the place of channels, where a shape can be that of one picture. */
function pictureOf(shape) {
  const sizes = shape[0] === 1 && shape.length > 2 ? shape.slice(1) : shape;
  const isChannels = (size) => size === 1 || size === 3 || size === 4;
  const large = (...sides) => sides.every((side) => side >= 8 && side <= 4096);
  if (sizes.length === 2 && large(...sizes)) return { height: sizes[0], width: sizes[1], channels: 1 };
  if (sizes.length !== 3) return null;
  const [a, b, c] = sizes;
  if (isChannels(c) && large(a, b)) return { height: a, width: b, channels: c };
  if (isChannels(a) && large(b, c)) return { height: b, width: c, channels: a, planes: true };
  return null;
}

/** Draw the first picture, from its least value to its greatest. */
function image(name, data, { height, width, channels, planes }) {
  const canvas = make("canvas", { width, height, role: "img", "aria-label": `${name} as an image` });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  let [low, high] = [Infinity, -Infinity];
  for (const value of data) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low >= 0 && high > 1 && high <= 255) [low, high] = [0, 255];
  const level = (value) => (high > low ? (255 * (value - low)) / (high - low) : 0);
  const area = width * height;
  for (let at = 0; at < area; at++) {
    for (let channel = 0; channel < 4; channel++) {
      const from = channels === 1 ? 0 : channel;
      const index = planes ? from * area + at : at * channels + from;
      pixels.data[4 * at + channel] = channel === 3 && channels < 4 ? 255 : level(data[index]);
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}
