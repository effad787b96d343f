"""The architecture in prose; every name in it is checked against the code."""

from architecture.lives import Life, Step
from architecture.workers import Worker

INTRODUCTION = """# Architecture

The server is one asyncio process. A request of any protocol becomes a `Call`. Every call passes
the same gates: shutdown, permission, limits, deadline. Then the model's *station* executes it: on
the event loop, in a batch, in a thread or on a device. Fast paths handle only common cases. They
never reject a request. All other cases take the general path, which alone decides on errors.

`tools/draw_architecture.py` generates this page, and reads packages, imports and limits from the
code. `tox run -e generated` fails if the page names code that does not exist.
"""

THREADS = """All state of requests and models belongs to the event loop. A thread receives a call,
and returns the result with `call_soon_threadsafe`. It accesses only the data in the column "may
touch".
"""

LIMITS = """The table names, for each limit, the class and parameter that receive it, or the module
that reads it. Meanings, units and defaults are in [settings](settings.md).
"""

TOUR = """## Common changes

Before a change, read this page and the README of the package concerned.

| addition | package | what to edit | what needs no edit |
| --- | --- | --- | --- |
| a datatype | `tensors/__init__.py` | Add a row to `_ROWS`. Add a `TYPE_` value with the same \
number to the enum in `protos/model_config.proto`. Run `python tools/generate.py` | gRPC and REST \
codecs, validation, configurations, the client, and the tests of all datatypes |
| a route | `http` | Add a handler next to similar ones, and a row with its operation to \
`table()`. Register a new class in `app/http.py`. Run `python tools/access_page.py` | gates, \
permissions, errors, the OpenAPI document and the documentation |
| an RPC | `grpc` | Edit `protos/` and run `python tools/generate.py`. Add a method to the \
service, and a row to `ROWS` in `methods.py`. The row has the operation, and the fields that name \
a model. If a mesh forwards the RPC, it also has the path of the id field. Run `python \
tools/access_page.py` | gates, permissions, statuses, reflection, deadlines, model ids of a mesh |
| a permission | `serving/access` | For a new condition on callers, add a field to `Caller` in \
`rules.py`, parse it in `rules_file.py`, and check it in `control.py: AccessControl.check`. This \
is the gate `permission`. It gets the operation, model, headers and peer of every call. For a new \
operation, add a member to `Operation` in `serving/call.py`, and assign it to routes and methods | \
every endpoint of every protocol, and the table in `docs/access.md` |
| a response cache | `serving/stations` | Write a delegating wrapper (a subclass of `Around`, such \
as `caching.py`) that forwards misses to the inner station. Add a row to `WRAPPINGS` in \
`table.py`. Account for its memory on the ledger, with a limit in a setting | protocols, \
ensembles, statistics. `serving/repeats.py` answers byte-identical requests from the built-in \
response cache only |
"""

LIVES: tuple[Life, ...] = (
    Life(
        "The life of a request",
        (
            Step(
                "grpc/http2/protocol.py: Http2Protocol.buffer_updated",
                "receives bytes from a gRPC client, and parses the frames in them. Over HTTP, "
                "`http/connection/connection.py` does this.",
            ),
            Step(
                "grpc/http2/headers.py: HeaderReader",
                "decodes the header block, and caches the result for repeated headers. It reads "
                "fields that differ between requests, such as deadlines, for every request.",
            ),
            Step(
                "serving/call.py: Call",
                "has the headers, the peer and the deadline. The transport creates it; over gRPC "
                "it is a `FastPathCall`.",
            ),
            Step(
                "serving/gates.py: Gates.admit",
                "passes the call through every gate, or raises. Then it notifies the observers.",
            ),
            Step(
                "serving/engine.py: Engine.begin",
                "finds the model, checks the tensors, and passes the call to the station of the "
                "loaded instance.",
            ),
            Step(
                "serving/stations/station.py: Station.begin",
                "executes the call immediately or queues it: on the event loop, in a batch, in a "
                "thread, or on a device.",
            ),
            Step(
                "serving/answers.py: deliver",
                "completes all calls of the execution, and releases their resources. Then each "
                "transport writes its answer.",
            ),
            Step(
                "serving/call.py: end_together",
                "is the only place where calls complete: answered, failed, expired or cancelled.",
            ),
        ),
    ),
    Life(
        "The life of a stream of answers",
        (
            Step(
                "serving/stations/generator.py: Generator.begin",
                "starts a task that computes the answers one by one in threads.",
            ),
            Step(
                "serving/call.py: Call.answer",
                "writes each answer, and marks the last one.",
            ),
            Step(
                "serving/call.py: Call.writable",
                "makes the generator wait while the client does not read (backpressure).",
            ),
            Step(
                "serving/call.py: Call.cancel",
                "ends the stream if the client disconnects, the deadline expires, or the model is "
                "unloaded.",
            ),
        ),
    ),
    Life(
        "The life of a batch",
        (
            Step(
                "serving/stations/batching.py: Batcher.submit",
                "queues a call. If a replica is idle, it dispatches together all calls that arrive "
                "in one iteration of the event loop.",
            ),
            Step(
                "serving/stations/batching.py: BatchQueue.take",
                "dequeues the oldest call, and later ones that fit into the same batch.",
            ),
            Step(
                "serving/stations/batching.py: pack",
                "concatenates the inputs of the calls, one array per input.",
            ),
            Step(
                "serving/stations/host.py: HostRunner.run",
                "executes the batch: on the event loop if the batch is fast, otherwise in a "
                "thread. On an accelerator, `DeviceRunner` passes it to the threads of the device.",
            ),
            Step(
                "serving/stations/offloading.py: OffloadingRunner.run",
                "wraps that runner if there are several workers. If all replicas are busy, an idle "
                "worker executes the batch.",
            ),
            Step(
                "serving/answers.py: deliver",
                "splits the outputs by rows. It completes all calls before the first answer is "
                "written.",
            ),
        ),
    ),
    Life(
        "The life of a load",
        (
            Step(
                "residence/control.py: ModelControl.load",
                "is the only entry point. It coalesces concurrent loads of one model.",
            ),
            Step(
                "residence/loading.py: VersionLoader.load",
                "predicts the memory and reserves it. If there is too little, it evicts models or "
                "waits. It also updates the state of the version.",
            ),
            Step(
                "residence/load_runner.py: LoadRunner.run",
                "runs the loader in a thread, with a timeout.",
            ),
            Step(
                "runtime/loaders.py",
                "detects the kind of model. `runtime/exported/jax_export.py` proves row "
                "independence, compiles the programs and warms them up.",
            ),
            Step(
                "serving/stations/table.py: Stations.build",
                "builds the station of the instance. Then the version is READY.",
            ),
            Step(
                "residence/finishing.py: Finisher.finish",
                "compiles the remaining batch sizes later, and rebuilds the station.",
            ),
        ),
    ),
)

WORKERS: tuple[Worker, ...] = (
    Worker(
        "cli/serve/command.py: _run_several",
        "the event loop of the parent, with `--processes`",
        "starts and monitors workers; accepts connections and passes them to workers",
        "listening sockets and channels to workers, but no model",
        "file descriptors, and messages on a channel",
    ),
    Worker(
        "workers/worker_process.py: _started",
        "one process per worker",
        "is a complete server for the connections that it gets from the parent, with its own set "
        "of the threads in this table",
        "everything that a server may touch",
        "messages on its channel",
    ),
    Worker(
        "workers/worker_process.py: WorkerProcess.ended",
        "asyncio's thread pool",
        "waits for the process of a worker to exit",
        "the exit status",
        "a future",
    ),
    Worker(
        "workers/link.py: Link._spooled",
        "asyncio's thread pool",
        "writes the files of a client's load to a file that the other workers can read",
        "the files of one load",
        "a future",
    ),
    Worker(
        "workers/link.py: Link._do",
        "asyncio's thread pool",
        "reads the file of `_spooled` in another worker",
        "that file",
        "a future",
    ),
    Worker(
        "workers/fronts/texts.py: Texts.read",
        "asyncio's thread pool",
        "reads a model's tokenizer and chat template in a front end",
        "files of the model version",
        "a future",
    ),
    Worker(
        "workers/worker.py: main",
        "the event loop of a worker",
        "serves requests, like the event loop of a single server",
        "the same as the event loop of a single server",
        "-",
    ),
    Worker(
        "app/successor.py: Successor.start",
        "the process that replaces this server",
        "starts a new server, which serves on the same sockets once it is ready",
        "the listening sockets, shared with this server",
        "one byte on a channel",
    ),
    Worker(
        "app/successor.py: Successor._hand_over",
        "asyncio's thread pool",
        "writes the clients' changes for the new process",
        "the journal of changes, and the files of loads",
        "a future",
    ),
    Worker(
        "app/replacing.py: take_changes",
        "asyncio's thread pool",
        "reads the changes that clients made in the replaced server",
        "the file received from that server",
        "a future",
    ),
    Worker(
        "workers/control.py: Control.replay_change",
        "asyncio's thread pool",
        "writes the files of such a change where the workers can read them",
        "the files of one load",
        "the path of the file",
    ),
    Worker(
        "app/successor.py: Successor._failed",
        "asyncio's thread pool",
        "waits for the exit of a new process that failed to start",
        "its exit status",
        "a future",
    ),
    Worker(
        "cli/serve/page.py: PageOpener.started",
        "`open-page`",
        "opens the status page in a browser (`--open`)",
        "the browser",
        "-",
    ),
    Worker(
        "cli/serve/command.py: _run",
        "the event loop",
        "reads and writes sockets, makes all decisions, executes fast models",
        "all state except that of the threads below",
        "-",
    ),
    Worker(
        "concurrency/host.py: HostThreads._wake_one",
        "`execute_N`",
        "execute models on the CPU, scheduled fairly between models; also decode long messages and "
        "images, and compress",
        "the model, and the inputs of the job",
        "the result, to `HostThreads._heard` on the event loop",
    ),
    Worker(
        "concurrency/workers.py: Workers.__init__",
        "`load_N`, `finish_N`, `compile_N`, `disk_N`, `remote_N`",
        "load models; compile the remaining programs after a load, and shapes on demand; do disk "
        "I/O; read remote stores",
        "files, JAX, and the model being loaded",
        "a future, which the event loop awaits with a timeout",
    ),
    Worker(
        "process/children.py: start_shielded",
        "the starting thread of each child process below",
        "starts a child process that does not receive signals meant for the server",
        "the signal mask of the calling thread",
        "the process",
    ),
    Worker(
        "process/best_effort.py: BestEffortStream._enqueue",
        "`log`",
        "writes log records when the reader of the log is slow; started at the first such record",
        "the queue of the stream, under its lock",
        "nothing; shutdown waits one second for it",
    ),
    Worker(
        "serving/observability/gpus.py: Gpus.polling",
        "`gpus`, if the server may use a GPU",
        "polls the GPU driver for metrics",
        "the latest sample",
        "the sample, to readers of `/metrics`; shutdown does not wait for it",
    ),
    Worker(
        "concurrency/limited.py: LimitedThreads._fill",
        "one thread per call with a time limit",
        "runs the call; abandoned if the call makes no progress within its limit",
        "as in the row of its pool",
        "a future",
    ),
    Worker(
        "concurrency/workers.py: Workers.device",
        "`dispatch D`, `fetch D`",
        "starts the two threads of a device when its first model is loaded",
        "-",
        "-",
    ),
    Worker(
        "concurrency/device.py: DeviceThreads.__init__",
        "`dispatch D`, `fetch D`",
        "the first dispatches executions to the device in order, the second waits for their "
        "results",
        "inputs, programs and outputs of the executions",
        "from the first thread to the second, then to the event loop",
    ),
    Worker(
        "concurrency/batches.py: BatchThread._hand_over",
        "`access-log`, `spans`",
        "write access log records, and export trace spans",
        "records owned by the thread; the log file, or the OpenTelemetry SDK",
        "nothing",
    ),
    Worker(
        "concurrency/joining.py: ended",
        "unnamed",
        "shuts down a thread pool, so that server shutdown can wait for it with a timeout",
        "the pool",
        "its exit",
    ),
    Worker(
        "python_models/threads.py: PlainThread.__init__",
        "`python MODEL COPY`",
        "runs the code of one replica of a Python model, one call at a time",
        "requests passed to the model, and anything that its code touches",
        "answers, by `Outbox.post` to the event loop",
    ),
    Worker(
        "python_models/readiness.py: CodeReadiness.ask",
        "`python MODEL is_ready`",
        "calls `is_ready` of one replica once",
        "anything that its code touches",
        "a future of the caller",
    ),
    Worker(
        "python_models/readiness.py: CodeReadiness._answer",
        "`python MODEL is_ready`, with its own event loop",
        "runs `is_ready` if it is a coroutine function",
        "anything that its code touches",
        "a future of the caller",
    ),
    Worker(
        "python_models/threads.py: LoopThread.__init__",
        "`python MODEL COPY`, with its own event loop",
        "runs the coroutines of one replica of a Python model concurrently",
        "requests passed to the model, and anything that its code touches",
        "answers, by `Outbox.post` to the event loop",
    ),
    Worker(
        "python_models/process/copies.py: ProcessCopy.__init__",
        "`python MODEL COPY`, `python MODEL COPY out`",
        "the first starts the process of a replica and reads its messages, the second writes to it",
        "the pipe, and the requests sent to the process",
        "answers, by `Outbox.post` to the event loop",
    ),
    Worker(
        "python_models/process/running.py: RunningProcess.__init__",
        "one process per replica, and a thread that reads its output",
        "runs the code of a Python model that is configured to run in a process",
        "its pipe, and anything that its code touches; no state of the server",
        "messages on its pipe; its output, as log records",
    ),
    Worker(
        "python_models/process/child.py: Child.run",
        "`load` and `unload`, in that process",
        "load and unload the model while the main thread reads messages",
        "the model",
        "messages on the pipe",
    ),
    Worker(
        "residence/platforms/predictions.py: FileReader.__init__",
        "`predict`",
        "reads model files to predict the memory that a model needs",
        "files",
        "a future",
    ),
    Worker(
        "storage/cache.py: ModelCache.__init__",
        "`download_N`",
        "download files of models from a remote store",
        "the store, and a cache file that no other thread uses",
        "a future, which a `remote_N` thread waits for",
    ),
    Worker(
        "storage/http_store.py: HttpStore._list",
        "`listing_N`",
        "request directory listings and object sizes from an HTTP store",
        "the store",
        "futures of the thread that lists the store",
    ),
    Worker(
        "runtime/programs/program_store.py: ProgramStore._look_up",
        "`look`, one per lookup",
        "looks up a compiled program in a store; abandoned if the store does not answer",
        "the store",
        "an event, which the load's thread waits for with a timeout",
    ),
    Worker(
        "runtime/programs/program_store.py: ProgramStore.put",
        "`programs`",
        "uploads compiled programs to a store after loads; exits when idle",
        "the store, and the queue of uploads under a lock",
        "nothing; shutdown waits two seconds for it",
    ),
    Worker(
        "local/process.py: ServerProcess.__init__",
        "`python -m xlaserve.local.child`, in its own session",
        "runs the server of `xlaserve.serve` until its parent stops it or exits",
        "everything that a server may touch",
        "its addresses and the results of its loads, as JSON lines on a pipe",
    ),
    Worker(
        "local/child.py: main",
        "`ends with its parent`",
        "sends SIGTERM to its own process when stdin is closed",
        "stdin",
        "-",
    ),
    Worker(
        "local/child.py: _serve",
        "the event loop of that process",
        "serves requests, like the event loop of `xlaserve serve`",
        "everything that a server may touch",
        "-",
    ),
    Worker(
        "local/servers.py: Serving.__aenter__",
        "asyncio's thread pool, in the user's program",
        "exports the function, starts the server and waits for its models to load",
        "the temporary repository and the process",
        "the running server, by a future",
    ),
    Worker(
        "local/servers.py: AsyncServer.update",
        "asyncio's thread pool, in the user's program",
        "exports a version with new parameters, and removes the previous one",
        "the temporary repository",
        "the version, by a future",
    ),
    Worker(
        "local/servers.py: AsyncServer.stop",
        "asyncio's thread pool, in the user's program",
        "waits for the server to drain and exit",
        "the process",
        "a future",
    ),
    Worker(
        "client/__init__.py: _Loop.__init__",
        "`xlaserve client`, in the user's program",
        "runs the event loop of a synchronous `Client`",
        "the connection of the client",
        "a future",
    ),
    Worker(
        "artifact/sizes.py: ",
        "`estimate`",
        "estimates a model's memory from its StableHLO; a mesh waits at most 0.1 s for the result",
        "the module; no state of the server",
        "a future",
    ),
    Worker(
        "runtime/trial.py: _run",
        "a process",
        "loads a model that a client sent, before the server loads it",
        "the model's files; no state of the server",
        "its exit status",
    ),
    Worker(
        "grpc/compression.py: compress",
        "asyncio's thread pool",
        "compresses a large answer",
        "the answer",
        "a future",
    ),
    Worker(
        "grpc/compression.py: decompress",
        "asyncio's thread pool",
        "decompresses a large message",
        "the message",
        "a future",
    ),
    Worker(
        "http/dashboard/history_page.py: HistoryRoutes.show",
        "asyncio's thread pool",
        "merges the histories of several processes, and removes models that the caller may not see",
        "snapshots of the histories",
        "a future",
    ),
    Worker(
        "http/dashboard/status_page.py: StatusRoutes.status",
        "asyncio's thread pool",
        "removes models that the caller may not see from the status",
        "a snapshot of the status",
        "a future",
    ),
    Worker(
        "http/dashboard/status_page.py: StatusRoutes._read",
        "asyncio's thread pool",
        "merges the status of several processes",
        "snapshots of their status",
        "a future",
    ),
    Worker(
        "generation/slots.py: Slots.__init__",
        "`generate MODEL`, one per language model",
        "runs prefill and decoding steps for all slots",
        "the KV cache, the programs, and the requests in slots",
        "tokens, by `ModelRequest.answer`, through the outbox to the event loop",
    ),
    Worker(
        "language/turns.py: CallerThread.__init__",
        "`text MODEL`, `chats MODEL`, `grammars MODEL`, `tokens MODEL`, started on demand",
        "tokenize prompts, render chats, compile grammars; scheduled fairly between callers",
        "the tokenizer, and requests that are not yet queued for a slot",
        "the request to `Slots.add`, or a result or an error by a future",
    ),
    Worker(
        "language/limited.py: _started",
        "processes of a language model: for its chat template, its grammars, and a tokenizer that "
        "may be slow",
        "evaluate clients' texts within limits of time and memory; killed when they exceed one",
        "texts of requests; no files, no sockets, no state of the server",
        "the result, on its pipe",
    ),
    Worker(
        "process/output.py: _started",
        "one process per server, unless stderr is a terminal",
        "reads the output of native code and child processes on stdout and stderr",
        "the socket that replaces both streams, and the original stderr",
        "log records; it outlives a server that crashes",
    ),
    Worker(
        "process/output.py: _start_reader",
        "`output`",
        "restarts that process when it exits",
        "its exit status",
        "a log record",
    ),
    Worker(
        "runtime/programs/compilers/pool.py: CompilerProcesses._enqueue",
        "`compiler_N`",
        "start a compiler process, send it jobs, and stop it when idle",
        "the pipes of the process",
        "an event, which the load's thread waits for",
    ),
    Worker(
        "runtime/programs/compilers/process.py: CompilerProcess.__init__",
        "compiler processes: up to `compile_processes` for loads, and those of `xlaserve plan`",
        "lower, compile and serialize programs, at low priority except for the first model; "
        "killed when the load is cancelled or times out",
        "artifacts sent to them; for `xlaserve plan`, files of models and a cache",
        "a program with its key and its sha256, on stdout",
    ),
    Worker(
        "runtime/programs/compilers/process.py: CompilerProcess._watched",
        "one thread per job of a compiler process",
        "kills the process if it exceeds its time or memory, or if it was stopped by a signal",
        "the process id",
        "nothing; the thread that reads the pipe sees the exit",
    ),
    Worker(
        "importers/onnx/watching.py: Watch.__init__",
        "`onnxruntime_watch`, one thread per run of onnxruntime during an import",
        "terminates the run if it exceeds its time or memory",
        "the options of the run",
        "nothing; the run fails with an error",
    ),
    Worker(
        "offline/targets/compiling.py: Compilers.__init__",
        "one thread per compiler process of `xlaserve plan`",
        "waits for the process",
        "the pipes of the process",
        "a future",
    ),
    Worker(
        "cli/bench/command.py: bench",
        "the event loop of `xlaserve bench`",
        "sends load to a server",
        "sockets",
        "-",
    ),
    Worker(
        "cli/bench/generate.py: measure_generation",
        "the event loop of `xlaserve bench --generate`",
        "sends load to a language model",
        "sockets",
        "-",
    ),
    Worker(
        "cli/health.py: health",
        "the event loop of `xlaserve health`",
        "sends one health request",
        "a socket",
        "-",
    ),
    Worker(
        "cli/asking/connection.py: ask_server",
        "the event loop of `xlaserve infer`, `models` and `top`",
        "sends requests to a server",
        "a socket",
        "-",
    ),
)
