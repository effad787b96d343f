// The same call as a command or a program to copy: curl, Python, grpcurl and JavaScript.

import { setText } from "./words.js";

/** The most elements of a tensor that a call is written with. */
const MOST_ELEMENTS = 4096;

const NUMPY = { FP16: "float16", FP32: "float32", FP64: "float64", BOOL: "bool_", BYTES: "object_" };

const CONTENTS = {
  BOOL: "bool_contents",
  INT8: "int_contents",
  INT16: "int_contents",
  INT32: "int_contents",
  INT64: "int64_contents",
  UINT8: "uint_contents",
  UINT16: "uint_contents",
  UINT32: "uint_contents",
  UINT64: "uint64_contents",
  FP32: "fp32_contents",
  FP64: "fp64_contents",
  BYTES: "bytes_contents",
};

/** Return the body of a request: JSON, with elements as they were typed. */
export function jsonOf({ inputs }) {
  const tensor = ({ name, datatype, shape, elements }) =>
    `{"name": ${JSON.stringify(name)}, "datatype": "${datatype}", "shape": ${JSON.stringify(shape)}, "data": [${elements.join(", ")}]}`;
  return `{"inputs": [${inputs.map(tensor).join(", ")}]}`;
}

/** Say why a call cannot be written as text; null where it can. */
function obstacle(call) {
  const file = call.inputs.find((input) => input.data);
  if (file) return `“${file.name}” is a file: the call in Python reads it.`;
  const long = call.inputs.find((input) => input.elements.length > MOST_ELEMENTS);
  return long ? `“${long.name}” is too long for a command: read it from a file in Python.` : null;
}

/** Return a command's header with the token, which is in a variable: no token is written down. */
const bearer = ({ token }) => (token ? '-H "Authorization: Bearer $TOKEN" ' : "");

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(call) {
  return (
    obstacle(call) ??
    `curl -s -H 'Content-Type: application/json' ${bearer(call)}\\\n  -d ${quoted(jsonOf(call))} \\\n  ${quoted(call.url)}`
  );
}

function javascript(call) {
  return (
    obstacle(call) ??
    `const answer = await fetch(${JSON.stringify(call.url)}, {
  method: "POST",
  headers: { "Content-Type": "application/json"${call.token ? ', Authorization: "Bearer TOKEN"' : ""} },
  body: ${JSON.stringify(jsonOf(call))},
});
console.log(JSON.stringify(await answer.json(), null, 2));`
  );
}

function python(call) {
  const { name, version, inputs, base, token } = call;
  const long = inputs.find((input) => !input.data && input.elements.length > MOST_ELEMENTS);
  if (long) return obstacle(call);
  const made = inputs.map(({ name: input, datatype, shape, elements, file }, at) => {
    const type = NUMPY[datatype] ?? datatype.toLowerCase();
    const path = JSON.stringify(file ?? "");
    let array = `np.array([${elements?.map(literal(datatype)).join(", ")}], np.${type}).reshape(${JSON.stringify(shape)})`;
    if (file) array = `np.load(${path})`;
    if (file && datatype === "BYTES") array = `np.array([open(${path}, "rb").read()], np.object_)`;
    return `x${at} = http.InferInput(${JSON.stringify(input)}, ${JSON.stringify(shape)}, "${datatype}")
x${at}.set_data_from_numpy(${array})`;
  });
  const secure = base.protocol === "https:" ? ", ssl=True" : "";
  const place = JSON.stringify(`${base.host}${base.pathname.replace(/\/$/, "")}`);
  return `import numpy as np
import tritonclient.http as http

client = http.InferenceServerClient(${place}${secure})
${made.join("\n")}
answer = client.infer(${JSON.stringify(name)}, [${inputs.map((_, at) => `x${at}`).join(", ")}], model_version="${version}"${token ? ', headers={"Authorization": "Bearer TOKEN"}' : ""})
for output in answer.get_response()["outputs"]:
    print(output["name"], answer.as_numpy(output["name"]))`;
}

function literal(datatype) {
  return (element) => {
    if (datatype === "BOOL") return element === "true" ? "True" : "False";
    return datatype === "BYTES" ? `${element}.encode()` : element;
  };
}

function grpcurl(call) {
  const why = obstacle(call);
  if (why) return why;
  const raw = call.inputs.find(({ datatype }) => !CONTENTS[datatype]);
  if (raw) return `“${raw.name}” is ${raw.datatype}, which gRPC sends only as raw bytes: use Python.`;
  const inputs = call.inputs.map(
    ({ name, datatype, shape, elements }) =>
      `{"name": ${JSON.stringify(name)}, "datatype": "${datatype}", "shape": ${JSON.stringify(shape)}, "contents": {"${CONTENTS[datatype]}": [${elements.map(contents(datatype)).join(", ")}]}}`,
  );
  const body = `{"model_name": ${JSON.stringify(call.name)}, "model_version": "${call.version}", "inputs": [${inputs.join(", ")}]}`;
  const plain = call.base.protocol === "https:" ? "" : "-plaintext ";
  return `grpcurl ${plain}${bearer(call)}-d ${quoted(body)} \\\n  ${call.grpc} inference.GRPCInferenceService/ModelInfer`;
}

function contents(datatype) {
  if (datatype !== "BYTES") return (element) => element;
  // Protobuf has bytes as base64 in JSON.
  return (element) => {
    const bytes = new TextEncoder().encode(JSON.parse(element));
    return JSON.stringify(btoa(String.fromCharCode(...bytes)));
  };
}

export const LANGUAGES = { curl, Python: python, grpcurl, JavaScript: javascript };

/** The languages of a call to OpenAI's endpoints: where it goes, and its body. */
export const TEXT_LANGUAGES = { curl: curlOfText, Python: pythonOfText };

function curlOfText({ base, path, body, token }) {
  const json = JSON.stringify(body);
  return `curl -sN -H 'Content-Type: application/json' ${bearer({ token })}\\\n  -d ${quoted(json)} \\\n  ${quoted(base.href + path)}`;
}

function pythonOfText({ base, path, body, token }) {
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${literalOf(value)},\n`);
  const [method, text] = path.includes("chat")
    ? ["chat.completions", "delta.content"]
    : ["completions", "text"];
  return `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${base.href}v1`)}, api_key="${token ? "TOKEN" : "none"}")
stream = client.${method}.create(
${given.join("")})
for chunk in stream:
    print(chunk.choices[0].${text} or "", end="", flush=True)`;
}

/** Write a value for Python: texts, numbers and lists of messages look there as in JSON. */
function literalOf(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}

/** Copy what one element shows, and say so in another. */
export async function copy(shown, said) {
  try {
    await navigator.clipboard.writeText(shown.textContent);
    setText(said, "Copied.");
  } catch {
    // Pages without TLS have no clipboard: the text is selected instead.
    getSelection().selectAllChildren(shown);
    setText(said, "Selected: copy it with the keyboard.");
  }
}
