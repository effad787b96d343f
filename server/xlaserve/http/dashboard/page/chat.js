// A chat with a generator, or texts for it to continue, over OpenAI's endpoints; and its slots.
//
// What a model answers is set as text, never as HTML.

import { TEXT_LANGUAGES, copy } from "./calls.js";
import { errorOf, eventsOf } from "./streams.js";
import { hasToken, request } from "./token.js";
import { byId, digits, duration, make, modelAddress, plural, setText } from "./words.js";

/** Tokens of an answer unless somebody says otherwise, where the model has twice as many. */
const MOST_TOKENS = 256;

/** Texts that are shown; older ones leave the document, and are sent with a chat all the same. */
const MOST_SHOWN = 100;

const DONE = "[DONE]";
const ENDS = { stop: "The answer is complete.", length: "The answer was cut at the token limit." };

/** The box of one version; what was said stays as long as that is the same. */
export class Chat {
  #key = "";
  #model = null;
  #said = [];
  #asking = null;

  constructor() {
    const form = byId("chat-form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    form.addEventListener("input", () => this.#write());
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || !this.#model?.chats) return;
      event.preventDefault();
      form.requestSubmit();
    });
    byId("chat-stop").addEventListener("click", () => this.#asking?.abort());
    byId("chat-new").addEventListener("click", () => this.#begin());
    byId("chat-language").addEventListener("change", () => this.#write());
    byId("chat-copy").addEventListener("click", () => copy(byId("chat-code"), byId("chat-copied")));
  }

  /** Show the slots of a version, and offer the box where OpenAI's endpoints would ask it. */
  update({ name, may, versions }, version) {
    const generator = version.state === "READY" ? version.loaded?.generator : null;
    byId("generator").hidden = !generator;
    if (!generator) return;
    slots(generator, version.loaded.pending);
    const { has_text: text, has_template: chats, no_text: reason, max_length: length } = generator;
    const asked = versions.filter((one) => one.state === "READY").at(-1).version;
    const key = JSON.stringify([name, version.version, asked, may.infer, text, chats, length]);
    if (this.#key === key) return;
    this.clear();
    this.#key = key;
    const note = noteOf({ name, asked, own: version.version, may, text, reason });
    byId("chat-note").hidden = note === null;
    byId("chat-note").replaceChildren(...(note ?? []));
    byId("chat").hidden = note !== null;
    this.#model = { name, chats };
    setText(byId("chat-title"), chats ? "Chat" : text ? "Complete a text" : "Generator");
    setText(byId("chat-asks"), chats ? "Message (Enter sends, Shift+Enter starts a new line)" : "Prompt");
    byId("chat-system-label").hidden = !chats;
    byId("chat-tokens").value = Math.max(1, Math.min(MOST_TOKENS, Math.floor(length / 2)));
    this.#write();
  }

  /** Forget the model and what was said; an answer on its way is cancelled. */
  clear() {
    this.#begin();
    this.#key = "";
    this.#model = null;
    for (const id of ["chat-text", "chat-system"]) byId(id).value = "";
    for (const id of ["chat-code", "chat-copied"]) setText(byId(id), "");
  }

  /** Begin with nothing said. */
  #begin() {
    this.#asking?.abort();
    this.#asking = null;
    this.#said = [];
    byId("chat-log").replaceChildren();
    byId("chat-stop").hidden = true;
    for (const id of ["chat-pace", "chat-status"]) setText(byId(id), "");
    if (this.#model) this.#write();
  }

  /** Return the call as the form has it: where it goes, and its body. */
  #call() {
    const { name, chats } = this.#model;
    const text = byId("chat-text").value;
    const body = { model: name };
    if (chats) {
      const system = byId("chat-system").value;
      const first = system ? [{ role: "system", content: system }] : [];
      body.messages = [...first, ...this.#said, { role: "user", content: text }];
    } else {
      body.prompt = text;
    }
    for (const [field, id] of [["temperature", "chat-temperature"], ["max_tokens", "chat-tokens"]]) {
      const number = byId(id).valueAsNumber;
      if (!Number.isNaN(number)) body[field] = number;
    }
    body.stream = true;
    const path = chats ? "v1/chat/completions" : "v1/completions";
    return { base: new URL(".", location.href), path, body, token: hasToken() };
  }

  #write() {
    if (this.#model) setText(byId("chat-code"), TEXT_LANGUAGES[byId("chat-language").value](this.#call()));
  }

  async #send() {
    const text = byId("chat-text").value;
    if (!this.#model || this.#asking || !text) return;
    const { path, body } = this.#call();
    const { chats } = this.#model;
    const asking = (this.#asking = new AbortController());
    const shown = [said(chats ? "You" : "Prompt", text), said(chats ? "Answer" : "Continuation", "")];
    const answer = new Answer(shown[1]);
    byId("chat-log").append(...shown);
    while (byId("chat-log").children.length > MOST_SHOWN) byId("chat-log").firstChild.remove();
    byId("chat-log").setAttribute("aria-busy", "true");
    byId("chat-text").value = "";
    byId("chat-stop").hidden = false;
    setText(byId("chat-pace"), "");
    setText(byId("chat-status"), "Waiting for the first token…");
    const end = await this.#ask(path, body, answer, asking);
    if (this.#asking !== asking) return; // begun anew, or another model
    this.#asking = null;
    byId("chat-stop").hidden = true;
    byId("chat-log").setAttribute("aria-busy", "false");
    setText(byId("chat-status"), end);
    if (answer.text || answer.finish) {
      this.#said.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    } else {
      for (const one of shown) one.remove();
      byId("chat-text").value ||= text;
    }
    this.#write();
  }

  /** Show an answer as it comes; return how it ended, which may be an error. */
  async #ask(path, body, answer, asking) {
    try {
      const got = await request(path, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ ...body, stream_options: { include_usage: true } }),
        signal: asking.signal,
      });
      if (!got.ok) throw new Error(await errorOf(got));
      for await (const { data } of eventsOf(got)) {
        if (data === DONE) return ENDS[answer.finish] ?? "The answer is complete.";
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        if (this.#asking !== asking) return ""; // its text has left the document
        answer.take(chunk);
        setText(byId("chat-pace"), answer.pace());
        if (answer.text) setText(byId("chat-status"), "Answering…");
      }
      return "The answer is incomplete: the connection was closed.";
    } catch (error) {
      return asking.signal.aborted ? "Stopped." : error.message;
    }
  }
}

/** An answer as it comes, and how quickly. */
class Answer {
  text = "";
  finish = "";
  #began = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;

  constructor(shown) {
    // A text that grows, in place of one that is written anew for each token.
    this.node = document.createTextNode("");
    shown.querySelector(".words").append(this.node);
  }

  /** Take a chunk; the last one says how many tokens there were in all. */
  take({ choices, usage }) {
    if (usage) this.#tokens = usage.completion_tokens;
    const [choice] = choices;
    if (!choice) return;
    this.finish = choice.finish_reason ?? "";
    const piece = choice.delta ? choice.delta.content : choice.text;
    if (!piece) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#tokens += 1;
    this.text += piece;
    const log = byId("chat-log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.node.appendData(piece);
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  /** Return the time to the first token, the number of tokens, and how many there are a second. */
  pace() {
    // Special tokens have no text.
    if (this.#first === null) return this.#tokens ? plural(this.#tokens, "token") : "";
    const parts = [`first token after ${duration((this.#first - this.#began) * 1e6)}`];
    parts.push(plural(this.#tokens, "token"));
    const seconds = (this.#last - this.#first) / 1e3;
    if (this.#tokens > 1 && seconds) parts.push(`${digits((this.#tokens - 1) / seconds)} tokens/s`);
    return parts.join(" · ");
  }
}

function said(who, text) {
  return make("div", { class: "said" }, make("h4", {}, who), make("p", { class: "words" }, text));
}

/** Say why there is no box; null where there is one. */
function noteOf({ name, asked, own, may, text, reason }) {
  if (!text) {
    const why = reason ? `It ${reason}` : "It has no tokenizer";
    return [`${why}: send token ids under “Try it”.`];
  }
  if (!may.infer) return ["You lack permission to use it."];
  if (asked === own) return null;
  const there = make("a", { href: modelAddress(name, "versions", asked) }, `version ${asked}`);
  return ["OpenAI's endpoints use the newest version, which is ", there, "."];
}

/** Show slots and positions, used and in all. */
function slots({ slots: all, running, positions, positions_used: used, output_tokens: made }, waiting) {
  const shown = byId("generator-slots");
  const bar = (id, label, most) =>
    make(
      "div",
      {},
      make("dt", {}, label),
      make("dd", {}, make("span", { id }), make("progress", { max: most || 1, "aria-label": label })),
    );
  const plain = (id, label) => make("div", {}, make("dt", {}, label), make("dd", { id }));
  const key = `${all} ${positions}`;
  if (shown.dataset.key !== key || !shown.firstChild) {
    shown.dataset.key = key;
    shown.replaceChildren(
      make(
        "dl",
        {},
        bar("slots-used", "Slots in use", all),
        plain("slots-waiting", "Waiting for a slot"),
        bar("positions-used", "Cache positions in use", positions),
        plain("tokens-made", "Tokens since load"),
      ),
    );
  }
  fill("slots-used", running, all);
  fill("positions-used", used, positions);
  setText(byId("slots-waiting"), waiting.toLocaleString("en"));
  setText(byId("tokens-made"), made.toLocaleString("en"));
}

function fill(id, used, all) {
  setText(byId(id), `${used.toLocaleString("en")} of ${all.toLocaleString("en")}`);
  byId(id).nextElementSibling.value = used;
}
