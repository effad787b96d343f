// The documentation: its examples name this server, and every operation can be tried.

const MOST_CHARACTERS = 20_000;

const root = new URL("..", location.href);

for (const origin of document.querySelectorAll(".origin")) {
  origin.textContent = root.href.replace(/\/$/, "");
}

for (const address of document.querySelectorAll(".grpc-address")) {
  const host = location.hostname;
  address.textContent = address.textContent.replace(/^localhost(?=:)/, () => host);
}

/** Return the address that a form asks for, and what it sends there. */
function request(form) {
  let path = form.dataset.path;
  const query = new URLSearchParams();
  const headers = new Headers();
  for (const { name, value, dataset } of form.querySelectorAll("input[name]")) {
    if (dataset.in === "path") path = path.replace(`{${name}}`, () => encodeURIComponent(value));
    else if (value && dataset.in === "query") query.set(name, value);
    else if (value && dataset.in === "header") headers.set(name, value);
  }
  const file = form.querySelector("[data-in=file]")?.files[0];
  const body = file ?? form.querySelector("[data-in=body]")?.value;
  if (body) {
    const type = form.querySelector("[data-in=type]").value;
    // A kind of type, as image/*, is that of the file.
    headers.set("Content-Type", type.endsWith("/*") ? file?.type || "image/png" : type);
  }
  const address = `${root.href.replace(/\/$/, "")}${path}${query.size ? `?${query}` : ""}`;
  return [address, { method: form.dataset.method, headers, body: body || undefined }];
}

/** What stops a request of a form that is still in progress. */
const running = new WeakMap();

async function send(form) {
  running.get(form)?.abort();
  const stop = new AbortController();
  running.set(form, stop);
  const shown = form.querySelector(".answer");
  shown.textContent = "…";
  try {
    const [address, options] = request(form);
    const answer = await fetch(address, { ...options, signal: stop.signal });
    const type = answer.headers.get("Content-Type") ?? "";
    shown.replaceChildren(status(answer, type));
    await show(answer, type, shown);
  } catch (error) {
    if (!stop.signal.aborted) shown.append(complaint(error.message));
  }
}

function complaint(text) {
  const line = document.createElement("p");
  line.className = "bad";
  line.textContent = text;
  return line;
}

function status({ status, statusText }, type) {
  const line = document.createElement("p");
  line.textContent = [`${status} ${statusText}`, type].filter(Boolean).join(", ");
  line.className = status < 400 ? "good" : "bad";
  return line;
}

async function show(answer, type, shown) {
  if (type.startsWith("application/json")) shown.append(box(pretty(await answer.text())));
  else if (/^(text\/|application\/jsonlines)/.test(type)) await follow(answer, shown);
  else shown.append(saved(await answer.blob()));
}

/** Show a text while it comes: a stream of events may go on for long. */
async function follow(answer, shown) {
  const pre = box("");
  shown.append(pre);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    pre.textContent = cut(text);
    if (text.length > MOST_CHARACTERS) return reader.cancel();
  }
}

function box(text) {
  const shown = document.createElement("pre");
  shown.tabIndex = 0;
  shown.textContent = cut(text);
  return shown;
}

function cut(text) {
  return text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)}\n…` : text;
}

function pretty(text) {
  // Numbers that JavaScript would round are shown as they came.
  return /\d{16}/.test(text) ? text : JSON.stringify(JSON.parse(text), null, 2);
}

/** Return a link that saves bytes which are no text. */
function saved(blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = "answer";
  link.textContent = `Save ${blob.size} bytes`;
  return link;
}

for (const form of document.querySelectorAll("form.try")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
}

/** What scrolls can be scrolled by keys. */
function reachable() {
  for (const area of document.querySelectorAll(".scroll")) {
    if (area.scrollWidth > area.clientWidth) area.tabIndex = 0;
    else area.removeAttribute("tabindex");
  }
}

addEventListener("resize", reachable);
reachable();
