// The counts of every version that was looked at, as rates and latencies.

import { History } from "./history.js";

const SPARE = 100;

/** A history for each version, bounded by how many the server has. */
export class Histories {
  #known = new Map();

  /** Take the counts of a version at a moment. */
  add({ name, version = "", requests = {} }, { bounds_ns: bounds, now }) {
    const key = keyOf(name, version);
    const history = this.#known.get(key) ?? new History();
    this.#known.set(key, history);
    history.add(now, requests.success ?? 0, requests.buckets ?? [], bounds, requests.fail ?? 0);
    return history;
  }

  /** Return the history of a version; undefined for one that was never looked at. */
  of(name, version = "") {
    return this.#known.get(keyOf(name, version));
  }

  /** Drop what is not among these any more, where there are many such. */
  forget(models) {
    if (this.#known.size <= 2 * models.length + SPARE) return;
    const known = new Set(models.map(({ name, version = "" }) => keyOf(name, version)));
    for (const key of this.#known.keys()) {
      if (!known.has(key)) this.#known.delete(key);
    }
  }
}

function keyOf(name, version) {
  return `${version} ${name}`;
}
