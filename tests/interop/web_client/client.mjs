// Calls a server over gRPC-Web with the stock clients of browsers, connect-web and grpc-web.
//
// Arguments: URL, file of a FileDescriptorSet, file of calls. Each line of that is JSON:
// {service, method, message, headers, timeoutMs, format}; each line of the output: {code, text,
// answers}, where the messages are JSON of protobuf. A format is one of grpc-web: text or binary.
import fs from "node:fs";
import { createFileRegistry, fromBinary, fromJson, toBinary, toJson } from "@bufbuild/protobuf";
import { FileDescriptorSetSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import grpcWeb from "grpc-web";
import XMLHttpRequest from "xhr2";

// Node.js has none, and grpc-web knows nothing else.
globalThis.XMLHttpRequest = XMLHttpRequest;

const [url, descriptors, calls] = process.argv.slice(2);
const files = fromBinary(FileDescriptorSetSchema, fs.readFileSync(descriptors));
const registry = createFileRegistry(files);
const transport = createGrpcWebTransport({ baseUrl: url });

async function call({ service, method, message, headers, timeoutMs }) {
  const described = registry.getService(service);
  const client = createClient(described, transport);
  const rpc = described.method[method];
  const answers = [];
  const note = (answer) => answers.push(toJson(rpc.output, answer));
  const request = fromJson(rpc.input, message);
  try {
    const answer = client[method](request, { headers, timeoutMs });
    if (rpc.methodKind === "unary") note(await answer);
    else for await (const one of answer) note(one);
    return { code: "OK", text: "", answers };
  } catch (error) {
    const found = ConnectError.from(error);
    return { code: Code[found.code], text: found.rawMessage, answers };
  }
}

function callOther({ service, method, message, headers, timeoutMs, format }) {
  const rpc = registry.getService(service).method[method];
  const isUnary = rpc.methodKind === "unary";
  const client = new grpcWeb.GrpcWebClientBase({ format });
  const described = new grpcWeb.MethodDescriptor(
    `/${service}/${rpc.name}`,
    isUnary ? grpcWeb.MethodType.UNARY : grpcWeb.MethodType.SERVER_STREAMING,
    Object,
    Object,
    (request) => toBinary(rpc.input, request),
    (bytes) => fromBinary(rpc.output, bytes),
  );
  const path = url + described.name;
  const metadata = { ...headers };
  if (timeoutMs) metadata.deadline = String(Date.now() + timeoutMs);
  const request = fromJson(rpc.input, message);
  const answers = [];
  const note = (answer) => answers.push(toJson(rpc.output, answer));
  return new Promise((resolve) => {
    const end = (error) =>
      resolve({ code: error ? Code[error.code] : "OK", text: error?.message ?? "", answers });
    if (isUnary) {
      client.rpcCall(path, request, metadata, described, (error, answer) => {
        if (!error) note(answer);
        end(error);
      });
    } else {
      const stream = client.serverStreaming(path, request, metadata, described);
      stream.on("data", note);
      stream.on("error", end);
      stream.on("end", () => end());
    }
  });
}

for (const line of fs.readFileSync(calls, "utf8").split("\n").filter(Boolean)) {
  const one = JSON.parse(line);
  console.log(JSON.stringify(await (one.format ? callOther(one) : call(one))));
}
