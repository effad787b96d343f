// Loads, reloads and unloads: each says first what it will cost and break, and then how to go back.

import { byId, bytes, fetchJson, make, plural, report } from "./words.js";

const WORDS = {
  load: { asks: "Load", does: "Loading…" },
  reload: { asks: "Reload", does: "Reloading…" },
  unload: { asks: "Unload", does: "Unloading…" },
};

export const labelOf = (verb) => WORDS[verb].asks;
export const progressOf = (verb) => WORDS[verb].does;

/** Return what a change costs and breaks, a sentence each. */
export function consequences(verb, model, memory) {
  const held = heldBy(model);
  const said = [];
  if (verb === "unload") {
    said.push(`This frees ${bytes(held)}; the model answers no requests until it is loaded again.`);
    const dependents = model.dependents.map((name) => `“${name}”`).join(", ");
    if (dependents) said.push(`Its dependents stop answering too: ${dependents}.`);
  } else if (verb === "reload") {
    said.push(`The old version answers until the new one is ready, which takes about ${bytes(held)} of additional memory.`);
  } else {
    said.push("Its memory size is known after the load.");
  }
  if (verb !== "load" && model.in_progress) {
    said.push(`${plural(model.in_progress, "request")} in progress will end on the old one.`);
  }
  if (verb !== "unload") said.push(memoryLeft(memory));
  return said;
}

const loadedOf = ({ versions }) => versions.filter((version) => version.loaded);

function heldBy(model) {
  return loadedOf(model).reduce((sum, { loaded: { devices } }) => sum + total(devices), 0);
}

function total(sizes) {
  return Object.values(sizes).reduce((sum, size) => sum + size, 0);
}

function memoryLeft({ used_bytes: used, total_bytes: all }) {
  if (all === null) return `Models hold ${bytes(used)}.`;
  return `Models hold ${bytes(used)} of ${bytes(all)}: ${bytes(Math.max(all - used, 0))} are free.`;
}

/** Change a model if that is wanted, once what it does is known. */
export async function ask(verb, name, memory, after) {
  const before = await confirmed(verb, name, memory);
  if (before) await change(verb, before, after);
}

const pageOf = (name) => fetchJson(`page/models/${encodeURIComponent(name)}`);

/** Ask whether a change is wanted; resolves to the model as it was before, null where it is not. */
async function confirmed(verb, name, memory) {
  const dialog = byId("confirm");
  if (dialog.open) return null;
  const model = await pageOf(name);
  if (!model.may.manage) {
    report(`${verb} of “${name}”: you may not do this`);
    return null;
  }
  byId("confirm-title").replaceChildren(`${labelOf(verb)} `, make("bdi", {}, name), "?");
  byId("confirm-text").replaceChildren(
    ...consequences(verb, model, memory).map((text) => make("li", {}, text)),
  );
  byId("confirm-yes").textContent = labelOf(verb);
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes" ? model : null;
}

/** Change a model, and say how it ended, with a way back where there is one. */
async function change(verb, before, after, config = null) {
  const { name } = before;
  try {
    const former = verb === "reload" ? await configOf(before) : null;
    await send(verb, name, config);
    report(...(await wayBack(verb, before, former, after)));
  } catch (error) {
    report(`${verb} of “${name}”: ${error.message}`);
  }
  await after();
}

/** Return what is said of a change that was made, and the button that takes it back. */
async function wayBack(verb, before, former, after) {
  const { name } = before;
  if (verb === "unload") {
    const again = `Load again: it held ${bytes(heldBy(before))}`;
    return [`“${name}” is unloaded.`, [again, () => change("load", before, after)]];
  }
  const now = await pageOf(name).catch(() => null); // another may have unloaded it
  if (now === null) return [`“${name}” was loaded.`];
  if (verb === "load") {
    const held = `“${name}” is loaded, and holds ${bytes(heldBy(now))}.`;
    return [held, ["Unload again", () => ask("unload", name, null, after)]];
  }
  const numbers = loadedOf(now).map(({ version }) => version);
  const gone = loadedOf(before).map(({ version }) => version).filter((one) => !numbers.includes(one));
  const done = `“${name}” is reloaded: ${versions(numbers)} answers.`;
  if (!gone.length) return [`${done} Its previous files were not kept.`];
  if (former === null) return [done];
  const config = { ...former, version_policy: { specific: { versions: gone.map(Number) } } };
  const label = `Serve ${versions(gone)} again: about ${bytes(heldBy(now))} more until it answers`;
  return [done, [label, () => change("reload", now, after, config)]];
}

const versions = (numbers) => `version ${numbers.join(", ")}`;

/** Return the configuration that a model answers with; null for who may not see it. */
async function configOf({ name, may, versions: all }) {
  const ready = all.filter(({ state }) => state === "READY").at(-1);
  if (!may.metadata || !ready) return null;
  const path = `v2/models/${encodeURIComponent(name)}/versions/${ready.version}/config`;
  return fetchJson(path).catch(() => null);
}

function send(verb, name, config) {
  const path = verb === "unload" ? "unload" : "load";
  const address = `v2/repository/models/${encodeURIComponent(name)}/${path}`;
  const body = config === null ? null : JSON.stringify({ parameters: { config } });
  const headers = body === null ? {} : { "Content-Type": "application/json" };
  return fetchJson(address, { method: "POST", headers, body });
}

for (const button of document.querySelectorAll("#confirm button")) {
  button.addEventListener("click", () => byId("confirm").close(button.value));
}
