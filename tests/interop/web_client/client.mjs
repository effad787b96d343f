// Calls a server over gRPC-Web with the stock client of browsers, connect-web.
//
// Arguments: URL, file of a FileDescriptorSet, file of calls. Each line of that is JSON:
// {service, method, message, headers, binary, timeoutMs}; each line of the output: {code, text,
// answers}, where the messages are JSON of protobuf.
import fs from "node:fs";
import { createFileRegistry, fromBinary, fromJson, toJson } from "@bufbuild/protobuf";
import { FileDescriptorSetSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";

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

for (const line of fs.readFileSync(calls, "utf8").split("\n").filter(Boolean)) {
  console.log(JSON.stringify(await call(JSON.parse(line))));
}
