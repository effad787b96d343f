// Calls methods by name with messages that are given and printed in hexadecimal.
//
// Each line of the file is: method, deadline ("-" for none, "cancel" after the first message),
// metadata ("-", or key=value,...), message; each line of the output: code, text of the status,
// messages.
"use strict";
const fs = require("fs");
const grpc = require("@grpc/grpc-js");

const raw = (bytes) => bytes;
const client = new grpc.Client(process.argv[2], grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": 64 << 20,
});

function call(method, deadline, pairs, message) {
  const metadata = new grpc.Metadata();
  for (const pair of pairs === "-" ? [] : pairs.split(",")) {
    const [key, value] = pair.split("=");
    metadata.add(key, key.endsWith("-bin") ? Buffer.from(value) : value);
  }
  const seconds = /^([0-9.]+)s$/.exec(deadline);
  const options = seconds ? { deadline: Date.now() + 1000 * Number(seconds[1]) } : {};
  return new Promise((resolve) => {
    const answers = [];
    const stream = client.makeBidiStreamRequest(method, raw, raw, metadata, options);
    stream.on("data", (answer) => {
      answers.push(answer.toString("hex"));
      if (deadline === "cancel") stream.cancel();
    });
    stream.on("error", () => {});
    stream.on("status", ({ code, details }) => {
      resolve([grpc.status[code], details, answers.join(",")].join("\t"));
    });
    stream.end(Buffer.from(message, "hex"));
  });
}

async function main() {
  for (const line of fs.readFileSync(process.argv[3], "utf8").split("\n").filter(Boolean)) {
    console.log(await call(...line.split("\t")));
  }
  client.close();
}

main();
