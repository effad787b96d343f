// Small charts: the values of a history as the path of an SVG.

import { WINDOW_SECONDS } from "./history.js";

const WIDTH = 120;
const MARGIN = 2;

/** Draw the values of one kind as a line; `area` is filled below it where there is one. */
export function draw(history, key, { line, area, height, top, now }) {
  const samples = history.idle ? [] : history.samples;
  const runs = split(samples, key).map((run) =>
    run.map((sample) => point(sample, key, { height, top, now })),
  );
  set(line, runs.map(stroke).join(""));
  if (area) set(area, runs.map((points) => fill(points, height)).join(""));
}

/** Split the samples where there is no value, so that lines do not cross what is not known. */
function split(samples, key) {
  const runs = [];
  let run = null;
  for (const sample of samples) {
    if (sample[key] === null) {
      run = null;
    } else if (run) {
      run.push(sample);
    } else {
      run = [sample];
      runs.push(run);
    }
  }
  return runs;
}

function point(sample, key, { height, top, now }) {
  const x = WIDTH * (1 - (now - sample.seconds) / WINDOW_SECONDS);
  const y = height - MARGIN - (height - 2 * MARGIN) * (top ? sample[key] / top : 0);
  return `${x.toFixed(1)} ${y.toFixed(1)}`;
}

// A point alone is drawn as a dot: a line to itself, with round ends.
function stroke(points) {
  return `M${points[0]}L${points.length > 1 ? points.slice(1).join("L") : points[0]}`;
}

function fill(points, height) {
  const [first] = points[0].split(" ");
  const [last] = points.at(-1).split(" ");
  return `M${first} ${height}L${points.join("L")}L${last} ${height}Z`;
}

function set(path, text) {
  if (path.getAttribute("d") !== text) path.setAttribute("d", text);
}
