// Streams of events as they come, and what answers say that are errors.

/** Yield name and data of each event of an answer; who leaves the loop cancels the stream. */
export async function* eventsOf(answer) {
  // Not every browser iterates over streams.
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (waiting + part.value).split("\n\n");
      waiting = events.pop();
      yield* events.map((text) => ({ name: field(text, "event"), data: field(text, "data") }));
    }
  } finally {
    reader.cancel().catch(() => {}); // one that has failed already
  }
}

function field(event, name) {
  return new RegExp(`^${name}: (.*)$`, "m").exec(event)?.[1] ?? "";
}

/** Return the text of an error: V2 has it as `error`, OpenAI's endpoints within that. */
export async function errorOf(answer) {
  const { error } = (await answer.json().catch(() => null)) ?? {};
  return error?.message ?? error ?? `${answer.status} ${answer.statusText}`;
}
