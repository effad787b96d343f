// What counts say of the time between them: rates, and latencies from histograms.

/** How far back charts go. */
export const WINDOW_SECONDS = 120;

/** What the numbers beside the charts are taken over. */
const RECENT_SECONDS = 10;

/** Samples further apart are not joined: nobody was looking in between. */
const GAP_SECONDS = 5;

/**
 * Return the duration that a share of the requests did not exceed, between the bounds of its
 * bucket in proportion; null where there were no requests.
 */
export function quantile(buckets, bounds, share) {
  const count = buckets.reduce((sum, each) => sum + each, 0);
  if (!count) return null;
  let left = share * count;
  for (const [index, inside] of buckets.entries()) {
    if (inside && left <= inside) {
      const low = index ? bounds[index - 1] : 0;
      return index < bounds.length ? low + ((bounds[index] - low) * left) / inside : low;
    }
    left -= inside;
  }
  return bounds.at(-1);
}

/** The last two minutes of one series of counts. */
export class History {
  /** One for each time that was looked at: seconds, how many, p50, p99, and the buckets. */
  samples = [];
  #before = null;

  /** Take the counts as they are at a time in seconds; all of them only ever grow. */
  add(seconds, success, buckets, bounds, fail = 0) {
    const before = this.#before;
    this.#before = { seconds, success, buckets, fail };
    // The first look says nothing of a rate, nor does one after the counts began anew.
    if (!before || success < before.success || seconds <= before.seconds) return;
    if (!success && !fail) return; // never asked: most models of many
    const elapsed = seconds - before.seconds;
    const count = success - before.success;
    const delta = count ? buckets.map((n, index) => n - (before.buckets[index] ?? 0)) : [];
    this.samples.push({
      seconds,
      elapsed,
      count,
      fails: Math.max(0, fail - before.fail),
      delta,
      rate: elapsed > GAP_SECONDS ? null : count / elapsed,
      p50: quantile(delta, bounds, 0.5),
      p99: quantile(delta, bounds, 0.99),
    });
    while (this.samples[0].seconds < seconds - WINDOW_SECONDS) this.samples.shift();
  }

  /** Whether there is anything to draw. */
  get idle() {
    return !this.samples.some((sample) => sample.count);
  }

  /** Return rate, p50 and p99 of the last seconds; null for what is not known. */
  recent(bounds) {
    const end = this.samples.at(-1)?.seconds;
    const latest = this.samples.filter((sample) => sample.seconds > end - RECENT_SECONDS);
    if (!latest.length) return { rate: null, p50: null, p99: null, errors: null };
    const sum = (key) => latest.reduce((total, sample) => total + sample[key], 0);
    const buckets = latest.reduce((all, { delta }) => add(all, delta), []);
    return {
      rate: sum("count") / sum("elapsed"),
      errors: sum("fails") / Math.max(1, sum("fails") + sum("count")),
      p50: quantile(buckets, bounds, 0.5),
      p99: quantile(buckets, bounds, 0.99),
    };
  }

  /** Return the largest value of a kind. */
  top(key) {
    return this.samples.reduce((most, sample) => Math.max(most, sample[key] ?? 0), 0);
  }
}

function add(left, right) {
  const [longer, shorter] = left.length < right.length ? [right, left] : [left, right];
  return longer.map((n, index) => n + (shorter[index] ?? 0));
}
