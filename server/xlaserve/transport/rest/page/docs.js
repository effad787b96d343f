// The documentation: its examples name this server, and GET can be tried.

const MOST_CHARACTERS = 20_000;

const root = new URL("..", location.href);

for (const origin of document.querySelectorAll(".origin")) {
  origin.textContent = root.href.replace(/\/$/, "");
}

/** Return the address that a form asks for. */
function address(form) {
  let path = form.dataset.path;
  const query = new URLSearchParams();
  for (const { name, value, dataset } of form.querySelectorAll("input")) {
    if (dataset.in === "path") path = path.replace(`{${name}}`, () => encodeURIComponent(value));
    else if (value) query.set(name, value);
  }
  return `${root.href.replace(/\/$/, "")}${path}${query.size ? `?${query}` : ""}`;
}

async function send(form) {
  const shown = form.querySelector(".answer");
  shown.textContent = "…";
  try {
    const answer = await fetch(address(form));
    const text = await answer.text();
    shown.replaceChildren(status(answer), body(text, answer.headers.get("Content-Type") ?? ""));
  } catch (error) {
    shown.textContent = error.message;
  }
}

function status({ status, statusText, headers }) {
  const line = document.createElement("p");
  line.textContent = `${status} ${statusText}, ${headers.get("Content-Type")}`;
  line.className = status < 400 ? "good" : "bad";
  return line;
}

function body(text, type) {
  const shown = document.createElement("pre");
  shown.tabIndex = 0;
  let pretty = text;
  if (type.startsWith("application/json")) pretty = JSON.stringify(JSON.parse(text), null, 2);
  shown.textContent =
    pretty.length > MOST_CHARACTERS ? `${pretty.slice(0, MOST_CHARACTERS)}\n…` : pretty;
  return shown;
}

for (const form of document.querySelectorAll("form.try")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
}
