// Try it: a form made of the metadata of a model, its answer, and the same call to copy.

import { output, readAnswer } from "./answers.js";
import { LANGUAGES, copy, jsonOf } from "./calls.js";
import { oneElement, readNpy } from "./npy.js";
import { errorOf, eventsOf } from "./streams.js";
import { hasToken, request } from "./token.js";
import { byId, duration, make, setText } from "./words.js";

const MOST_ZEROS = 4096;
const MOST_ANSWERS = 200;
const NUMBER = /^-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$/;

/** The form of one version of a model; made again where its metadata change. */
export class TryIt {
  #fields = [];
  #call = null;
  #sending = null;
  #isPinned = false;

  constructor() {
    byId("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("try-form").addEventListener("input", () => this.#write());
    byId("try-language").addEventListener("change", () => this.#write());
    byId("try-copy").addEventListener("click", () => copy(byId("try-code"), byId("try-copied")));
  }

  /** Make the form of a version that answers. */
  show(name, version, { inputs, outputs, decoupled }, grpc) {
    this.clear();
    const [first, , , what] = location.hash.split("/");
    // A place within the page, such as `#try`, says nothing of the version.
    if (first === "#") this.#isPinned = what === "versions";
    // Without a version the newest one answers, so a copied call outlives this one.
    this.model = { name, version: this.#isPinned ? version : "", outputs, decoupled, grpc };
    this.#fields = inputs.map((input) => new Field(input, () => this.#write()));
    byId("try-inputs").replaceChildren(...this.#fields.map((field) => field.element));
    this.#write();
  }

  /** Forget what was asked and answered; what is on its way is cancelled. */
  clear() {
    this.#sending?.abort();
    this.#sending = null;
    this.#fields = [];
    byId("try-inputs").replaceChildren();
    byId("try-outputs").replaceChildren();
    for (const id of ["try-status", "try-code"]) setText(byId(id), "");
  }

  /** Write the call as it stands; what is wrong with it is said where the code would be. */
  #write() {
    const base = new URL(".", location.href);
    const { name, version, grpc } = this.model;
    try {
      const pin = version && `/versions/${version}`;
      const path = `v2/models/${encodeURIComponent(name)}${pin}/infer`;
      const inputs = this.#fields.map((field) => field.read()).filter(Boolean);
      this.#call = { name, version, inputs, url: base.href + path, base, grpc: address(grpc, base) };
      this.#call.token = hasToken();
      setText(byId("try-code"), LANGUAGES[byId("try-language").value](this.#call));
    } catch (error) {
      this.#call = null;
      setText(byId("try-code"), error.message);
    }
  }

  async #send() {
    this.#write();
    if (!this.#call) {
      setText(byId("try-status"), byId("try-code").textContent);
      return;
    }
    this.#sending?.abort();
    const sending = (this.#sending = new AbortController());
    byId("try-outputs").replaceChildren();
    setText(byId("try-status"), "Waiting for the answer…");
    const began = performance.now();
    const said = (text) => {
      if (this.#sending === sending) setText(byId("try-status"), text);
    };
    try {
      const sent = { method: "POST", signal: sending.signal, ...packed(this.#call) };
      if (this.model.decoupled) sent.headers.Accept = "text/event-stream";
      const answer = await request(this.#call.url, sent);
      if (!answer.ok) throw new Error(await errorOf(answer));
      const streamed = answer.headers.get("Content-Type")?.startsWith("text/event-stream");
      const count = streamed ? await this.#stream(answer, sending) : 1;
      if (!streamed) this.#show(readAnswer(await answer.text()), sending);
      const took = duration((performance.now() - began) * 1e6);
      said(count === 1 ? `Answered in ${took}.` : `${count} answers in ${took}.`);
    } catch (error) {
      said(error.message);
    }
  }

  /** Show the answers of a stream as they come; return how many there were. */
  async #stream(answer, sending) {
    let count = 0;
    for await (const { name, data } of eventsOf(answer)) {
      if (name === "error") throw new Error(JSON.parse(data).error);
      this.#show(readAnswer(data || "{}"), sending);
      count += 1;
      if (this.#sending === sending) setText(byId("try-status"), `${count} answers so far…`);
    }
    return count;
  }

  #show({ outputs = [] }, sending) {
    if (this.#sending !== sending) return;
    const known = new Map(this.model.outputs.map((one) => [one.name, one]));
    const shown = byId("try-outputs");
    shown.append(...outputs.map((one) => output(one, known.get(one.name))));
    while (shown.children.length > MOST_ANSWERS) shown.firstChild.remove();
  }
}

/** Return where gRPC is, as the setting has it. */
function address(setting, base) {
  const [kind, ...rest] = setting.split(":");
  if (kind === "unix") return `-unix ${rest.join(":")}`;
  const port = rest.at(-1);
  return port && port !== "0" ? `${base.hostname}:${port}` : `${base.hostname}:PORT`;
}

/** Return body and headers of a request: JSON, with files behind it (binary tensor data). */
function packed(call) {
  const files = call.inputs.filter((input) => input.data);
  if (!files.length) {
    return { headers: { "Content-Type": "application/json" }, body: jsonOf(call) };
  }
  const inputs = call.inputs.map(({ name, datatype, shape, data, elements }) =>
    data
      ? { name, datatype, shape, parameters: { binary_data_size: data.length } }
      : { name, datatype, shape, data: elements.map((element) => JSON.parse(element)) },
  );
  const json = new TextEncoder().encode(JSON.stringify({ inputs }));
  return {
    headers: {
      "Content-Type": "application/octet-stream",
      "Inference-Header-Content-Length": String(json.length),
    },
    body: new Blob([json, ...files.map((file) => file.data)]),
  };
}

/** One input: typed, or a file. */
class Field {
  #file = null;

  constructor(input, changed) {
    this.input = input;
    this.changed = changed;
    const { name, datatype, shape, parameters = {} } = input;
    const open = shape.map((size) => (size < 0 ? 1 : size));
    const size = open.reduce((all, each) => all * each, 1);
    const zero = { BYTES: "text", BOOL: "false" }[datatype] ?? "0";
    const separator = datatype === "BYTES" ? "\n" : ", ";
    const zeros = Array(Math.min(size, MOST_ZEROS)).fill(zero).join(separator);
    const label = (text) => `${text} of ${name}`;
    this.shape = make("input", { value: open.join(", "), "aria-label": label("Shape") });
    this.data = make("textarea", { rows: 3, spellcheck: "false", "aria-label": label("Elements") });
    this.data.value = parameters.optional ? "" : zeros;
    this.file = make("input", { type: "file", accept: ".npy,image/*", "aria-label": label("File") });
    this.said = make("span", { class: "quiet", role: "status" });
    this.file.addEventListener("change", () => this.#take(this.file.files[0]));
    this.element = make(
      "fieldset",
      { class: "field" },
      make("legend", {}, make("bdi", {}, name), ` ${datatype} [${shape.join(", ")}]`),
      make("label", {}, "Shape ", this.shape),
      this.data,
      make("label", { class: "drop" }, "Or choose or drop a .npy file or an image: ", this.file, this.said),
    );
    this.element.addEventListener("dragover", (event) => event.preventDefault());
    this.element.addEventListener("drop", (event) => {
      event.preventDefault();
      this.#take(event.dataTransfer.files[0]);
    });
  }

  async #take(file) {
    this.#file = null;
    this.data.hidden = Boolean(file);
    if (file) {
      try {
        const buffer = await file.arrayBuffer();
        const read = file.name.endsWith(".npy") ? readNpy(buffer) : oneElement(buffer);
        this.#file = { ...read, file: file.name };
        this.shape.value = read.shape.join(", ");
        setText(this.said, `${file.name}: ${read.datatype} [${read.shape.join(", ")}]`);
      } catch (error) {
        this.data.hidden = false;
        setText(this.said, `${file.name}: ${error.message}`);
      }
    } else {
      setText(this.said, "");
    }
    this.changed();
  }

  /** Return the tensor; null for an optional one that is left empty, throws for what is none. */
  read() {
    const { name, datatype, parameters = {} } = this.input;
    if (this.#file) return { name, ...this.#file };
    if (parameters.optional && !this.data.value) return null;
    const shape = this.shape.value.split(",").map((each) => each.trim()).filter(Boolean).map(Number);
    if (!shape.every((size) => Number.isInteger(size) && size >= 0)) {
      throw new Error(`input “${name}”: expected comma-separated sizes, got “${this.shape.value}”`);
    }
    const elements = elementsOf(name, datatype, this.data.value);
    const wanted = shape.reduce((all, size) => all * size, 1);
    // One number for all is convenient.
    const filled = elements.length === 1 && wanted > 1 ? Array(wanted).fill(elements[0]) : elements;
    if (filled.length !== wanted) {
      throw new Error(`input “${name}”: expected ${wanted} elements, got ${filled.length}`);
    }
    return { name, datatype, shape, elements: filled };
  }
}

/** Return the elements as JSON, each exactly as it was typed. */
function elementsOf(name, datatype, text) {
  if (datatype === "BYTES") return text.split("\n").map((line) => JSON.stringify(line));
  const words = text.split(/[\s,[\]]+/).filter(Boolean);
  const fits = (word) => (datatype === "BOOL" ? word === "true" || word === "false" : NUMBER.test(word));
  const wrong = words.find((word) => !fits(word));
  if (wrong === undefined) return words.map((word) => (datatype === "BOOL" ? word : plain(word)));
  throw new Error(`input “${name}”: expected elements of ${datatype}, got “${wrong}”`);
}

/** Write a number as JSON has it: `.5` and `5.` are none there. */
function plain(word) {
  return word
    .replace(/^(-?)0*(?=\d)/, "$1")
    .replace(/^(-?)\./, "$10.")
    .replace(/\.(?=$|[eE])/, "");
}
