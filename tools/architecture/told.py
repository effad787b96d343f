"""The architecture in prose; every name in it is checked against the code."""

from architecture.lives import Life, Step
from architecture.workers import Worker

INTRODUCTION = """# Architecture

Made by `tools/draw_architecture.py`, which reads the rooms, the arrows and the limits from the
code and looks up every name below in it: a step, a thread or a limit that no longer exists
fails `tox run -e generated`.

One asyncio process. A request of any protocol is one `Call`; every call passes one table of
gates; a station answers what it asks of a model. A fast path only accepts: what is not plainly
ordinary goes to the general path, which has the last word.
"""

THREADS = """All state of requests and models belongs to the event loop. A thread is given a call
and hands its result back with `call_soon_threadsafe`; it touches nothing else.
"""

LIMITS = """Read from `Settings` and from what the composition root passes on. What each means, its
unit and its default are in `settings.md`.
"""

TOUR = """## Where a change goes

A newcomer reads this page, then the README of the one room that the change is in.

| change | room | what to touch there | what follows by itself |
| --- | --- | --- | --- |
| a datatype | `tensors/__init__.py` | a row of `_ROWS`; a `TYPE_` with the number of that row \
in the enumeration of `protos/model_config.proto`, then `python tools/generate.py` | codecs of \
gRPC and REST, checks, configurations, the client and the tests of all datatypes read the table |
| a route | `http` | a handler beside its like, and a row of its `table()` with its \
operation; a class of its own is put into the table by `app/http.py`; then `python \
tools/access_page.py` | gates, permissions, errors, the OpenAPI document and the documentation \
page |
| an RPC | `grpc` | `protos/`, `python tools/generate.py`, a method of the service, \
and a row of `ROWS` in `methods.py` with its operation, the fields that name a model, and the path \
of the id if it goes through a mesh; then `python tools/access_page.py` | gates, permissions, \
statuses, reflection, deadlines, ids of a mesh |
| a permission | `serving/access` | what a caller may do: a field of `Caller` in \
`rules.py`, read by `rules_file.py`, decided in `control.py: AccessControl.check`, which is the \
gate `permission` and sees the operation, the model, the headers and the peer of every call. \
What may be permitted: a member of `Operation` in `serving/call.py`, and the rows of routes \
and methods that are of it | every door of every protocol, the table in `docs/access.md` |
| a cache of answers | `serving/stations` | a station around others that asks the one \
within when it has no answer (an `Around`, as `caching.py`), and a row of `WRAPPINGS` in \
`table.py`; what it keeps is on the ledger, within a setting | every protocol, ensembles, \
statistics; the same bytes again are answered by `serving/repeats.py` only from the \
response cache |
"""

LIVES: tuple[Life, ...] = (
    Life(
        "The life of a request",
        (
            Step(
                "grpc/http2/protocol.py: Http2Protocol.buffer_updated",
                "has bytes of a gRPC client; over HTTP it is "
                "`http/connection/connection.py`. One pass handles all that came.",
            ),
            Step(
                "grpc/http2/headers.py: HeaderReader",
                "decodes the header block once; what varies is kept as fields, and what it decides "
                "is looked up for every request.",
            ),
            Step(
                "serving/call.py: Call",
                "is made by the transport: `FastPathCall` over gRPC. It has the headers, the peer "
                "and the deadline.",
            ),
            Step(
                "serving/gates.py: Gates.admit",
                "lets the call pass every gate, or raises; observers see it begin.",
            ),
            Step(
                "serving/engine.py: Engine.begin",
                "finds the model, checks the tensors, and hands the call to the station of the "
                "instance.",
            ),
            Step(
                "serving/stations/station.py: Station.begin",
                "answers now, or later: on the event loop, in a batch, in a thread, on a device.",
            ),
            Step(
                "serving/answers.py: deliver",
                "ends the calls that were executed together, releases what they hold, and then "
                "has each transport write its answer.",
            ),
            Step(
                "serving/call.py: end_together",
                "is the one end of a call: answered, failed, expired or cancelled.",
            ),
        ),
    ),
    Life(
        "The life of a stream of answers",
        (
            Step(
                "serving/stations/generator.py: Generator.begin",
                "starts a task that computes one answer after the other in threads.",
            ),
            Step("serving/call.py: Call.answer", "writes each, and marks the last."),
            Step(
                "serving/call.py: Call.writable",
                "holds the generator back while the client does not read (backpressure).",
            ),
            Step(
                "serving/call.py: Call.cancel",
                "ends it when the client leaves, the deadline passes or its model is retired.",
            ),
        ),
    ),
    Life(
        "The life of a batch",
        (
            Step(
                "serving/stations/batching.py: Batcher.submit",
                "enqueues a call; while a replica is free it leaves with whatever came in the same "
                "pass of the event loop.",
            ),
            Step(
                "serving/stations/batching.py: BatchQueue.take",
                "takes the oldest call and later ones that fit into its batch.",
            ),
            Step("serving/stations/batching.py: pack", "makes one array of each input."),
            Step(
                "serving/stations/host.py: HostRunner.run",
                "executes it on the event loop where that is quick, else in a thread; "
                "`DeviceRunner` gives it to the threads of a device.",
            ),
            Step(
                "serving/stations/offloading.py: OffloadingRunner.run",
                "stands around it where there are several workers, and has another one that is "
                "idle execute the batch where every replica is busy.",
            ),
            Step(
                "serving/answers.py: deliver",
                "splits the outputs by rows and ends all its calls before any is told.",
            ),
        ),
    ),
    Life(
        "The life of a load",
        (
            Step(
                "residence/control.py: ModelControl.load",
                "is the only entry point; concurrent loads of one model are coalesced.",
            ),
            Step(
                "residence/loading.py: VersionLoader.load",
                "predicts, reserves, evicts or waits, and changes the state of the version.",
            ),
            Step(
                "residence/load_runner.py: LoadRunner.run",
                "runs the loader in a thread, within a limit of time.",
            ),
            Step(
                "runtime/loaders.py",
                "recognises the kind of model; `runtime/exported/jax_export.py` proves, compiles, "
                "warms up.",
            ),
            Step(
                "serving/stations/table.py: Stations.build",
                "builds the station of the instance; the version is READY.",
            ),
            Step(
                "residence/finishing.py: Finisher.finish",
                "compiles the remaining batch sizes afterwards, and rebuilds the station.",
            ),
        ),
    ),
)

WORKERS: tuple[Worker, ...] = (
    Worker(
        "cli/serve/command.py: _run_several",
        "the loop of the parent, with `--processes`",
        "accepts connections and hands them to workers, which it starts and watches",
        "sockets that listen, channels to workers; no model",
        "descriptors, and messages on a channel",
    ),
    Worker(
        "workers/worker_process.py: _started",
        "a process for each worker",
        "is a server in every row of this table, for the connections that it is handed",
        "what a server may",
        "messages on its channel",
    ),
    Worker(
        "workers/worker_process.py: WorkerProcess.ended",
        "asyncio's threads",
        "waits for a worker that has closed its channel",
        "its exit status",
        "a future",
    ),
    Worker(
        "workers/link.py: Link._spooled",
        "asyncio's threads",
        "writes the files of a load where the other workers can read them",
        "the files of one load",
        "a future",
    ),
    Worker(
        "workers/link.py: Link._do",
        "asyncio's threads",
        "reads such a file",
        "that file",
        "a future",
    ),
    Worker(
        "workers/fronts/texts.py: Texts.read",
        "asyncio's threads",
        "reads the tokenizer, and the template of a generator, again in a front end",
        "the files of that version",
        "a future",
    ),
    Worker(
        "workers/worker.py: main",
        "the loop of a worker",
        "is the event loop of the next row",
        "as the next row",
        "-",
    ),
    Worker(
        "app/successor.py: Successor.start",
        "the process that replaces this one",
        "serves once it is ready, on the sockets of this one",
        "the listening sockets, which both have",
        "one byte on a channel",
    ),
    Worker(
        "app/successor.py: Successor._hand_over",
        "a thread for one call",
        "writes what clients have changed for the replacement",
        "the journal, and the files of loads",
        "-",
    ),
    Worker(
        "app/replacing.py: take_changes",
        "a thread for one call",
        "reads what clients have changed in the replaced server",
        "a file that it has handed over",
        "the next change",
    ),
    Worker(
        "workers/control.py: Control.make_again",
        "a thread for one call",
        "writes the files of such a change for the workers",
        "the files of a load",
        "a path",
    ),
    Worker(
        "app/successor.py: Successor._failed",
        "a thread for one call",
        "waits for the end of a replacement that failed",
        "its exit status",
        "the return value",
    ),
    Worker(
        "cli/serve/page.py: PageOpener.started",
        "`open-page`",
        "opens the status page in a browser, with `--open`",
        "a browser",
        "-",
    ),
    Worker(
        "cli/serve/command.py: _run",
        "the event loop",
        "reads and writes sockets, decides, executes models that are quick",
        "everything but what is below",
        "-",
    ),
    Worker(
        "concurrency/host.py: HostThreads._wake_one",
        "`execute_N`",
        "computes on the host, in turns between models; long messages, images, compression too",
        "the inputs that it was given, and the model",
        "`HostThreads._heard` on the loop",
    ),
    Worker(
        "concurrency/workers.py: Workers.__init__",
        "`load_N`, `finish_N`, `compile_N`, `disk_N`, `remote_N`",
        "loads models; compiles what loads leave, and shapes on demand; waits for the disk, and "
        "for stores",
        "files, JAX, the model that it makes",
        "a future that the loop waits for, within a limit of time",
    ),
    Worker(
        "process/children.py: start_deaf",
        "each of the processes below that has a row of its own",
        "starts it so that it does not hear what is meant for the server",
        "the mask of signals of the thread that starts it",
        "nothing",
    ),
    Worker(
        "process/best_effort.py: BestEffortStream._enqueue",
        "`log`",
        "writes records of the log whose reader does not read; there from the first of them on",
        "the queue of the stream, under its lock",
        "nothing; the end waits a second for it",
    ),
    Worker(
        "serving/observability/gpus.py: Gpus.asked",
        "`gpus`, where a GPU may be used",
        "asks the driver of the GPUs how they are, again and again",
        "its last answer",
        "whoever reads `/metrics`; the end waits for nothing of it",
    ),
    Worker(
        "concurrency/limited.py: LimitedThreads._fill",
        "one thread for each limited call",
        "runs one call, and is abandoned when that makes no progress",
        "as above",
        "as above",
    ),
    Worker(
        "concurrency/workers.py: Workers.device",
        "the threads of a device",
        "made when the first model asks for them",
        "see the next row",
        "see the next row",
    ),
    Worker(
        "concurrency/device.py: DeviceThreads.__init__",
        "`dispatch D`, `fetch D`",
        "one gives the device its work, in order; one waits for what it computes",
        "the inputs, the program, the outputs",
        "from the first to the second, then to the loop",
    ),
    Worker(
        "concurrency/batches.py: BatchThread._hand_over",
        "`access-log`, `spans`",
        "writes what observers of calls noted, or makes spans of it",
        "entries that nobody else has, and the file or the SDK",
        "nothing",
    ),
    Worker(
        "concurrency/joining.py: ended",
        "unnamed",
        "ends a pool, so that the end of the server can bound its wait",
        "the pool",
        "its own end",
    ),
    Worker(
        "python_models/threads.py: PlainThread.__init__",
        "`python MODEL COPY`",
        "runs the code of one copy of a Python model, one call after the other",
        "the requests that it was handed, and whatever the code touches",
        "`Outbox.post` to the loop",
    ),
    Worker(
        "python_models/readiness.py: CodeReadiness.ask",
        "`python MODEL is_ready`",
        "asks the code of one copy whether it is ready, once",
        "whatever the code touches",
        "the future of who asked",
    ),
    Worker(
        "python_models/readiness.py: CodeReadiness._answer",
        "the same, with an event loop of its own",
        "runs `is_ready` where that is a coroutine",
        "as above",
        "as above",
    ),
    Worker(
        "python_models/threads.py: LoopThread.__init__",
        "the same, with an event loop of its own",
        "runs the coroutines of one copy of a Python model side by side",
        "as above",
        "as above",
    ),
    Worker(
        "python_models/process/copies.py: ProcessCopy.__init__",
        "`python MODEL COPY`, and the same with `out`",
        "one starts the process of a copy, and hears it; one writes to it",
        "the pipe, the requests that the process has",
        "`Outbox.post` to the loop",
    ),
    Worker(
        "python_models/process/running.py: RunningProcess.__init__",
        "a process for each copy, and a thread for what it prints",
        "runs the code of a Python model that asks for a process",
        "its pipe, and whatever the code touches; nothing of the server",
        "messages on its pipe; lines to the log",
    ),
    Worker(
        "python_models/process/child.py: Child.run",
        "in that process: `load`, `unload`",
        "load and unload the model, while the process listens",
        "the model",
        "messages on the pipe",
    ),
    Worker(
        "residence/platforms/predictions.py: FilesLook.__init__",
        "`predict`",
        "looks at files to predict what a model will take",
        "files",
        "a future",
    ),
    Worker(
        "storage/cache.py: ModelCache.__init__",
        "`download_N`",
        "fetches one file of a model from a store",
        "the store, and a file of the cache that nobody else has",
        "a future that a `remote_N` waits for",
    ),
    Worker(
        "storage/http_store.py: HttpStore.objects",
        "`listing_N`",
        "asks a store over HTTP for the pages of directories, and for the sizes of objects",
        "the store",
        "futures that whoever lists waits for",
    ),
    Worker(
        "runtime/programs/program_store.py: ProgramStore._looked",
        "`look`, one for each look",
        "asks a store for a program that a load needs; abandoned if the store does not answer",
        "the store",
        "an event that the thread of a load waits for, for some seconds",
    ),
    Worker(
        "runtime/programs/program_store.py: ProgramStore.put",
        "`programs`",
        "uploads compiled programs to a store after loads; ends when idle",
        "the store, and programs that wait, under a lock",
        "nothing; the end of the server waits two seconds for it",
    ),
    Worker(
        "local/process.py: ServerProcess.__init__",
        "`python -m xlaserve.local.child`, in a session of its own",
        "serves for `xlaserve.serve`, until the process that started it ends or says so",
        "whatever a server touches",
        "lines of JSON on a pipe: its addresses, and how its models were loaded",
    ),
    Worker(
        "local/child.py: main",
        "`ends with its parent`",
        "sends SIGTERM to its own process once stdin has ended",
        "stdin",
        "-",
    ),
    Worker(
        "local/child.py: _serve",
        "the event loop of that process",
        "serves",
        "whatever a server touches",
        "-",
    ),
    Worker(
        "local/servers.py: Serving.__aenter__",
        "a thread of the program's event loop",
        "exports, starts the server, and waits until its models were tried",
        "the temporary repository and the process",
        "the server that runs, by the future of the thread",
    ),
    Worker(
        "local/servers.py: AsyncServer.update",
        "a thread of the program's event loop",
        "exports with other parameters, and removes the version before",
        "the temporary repository",
        "the version, by the future of the thread",
    ),
    Worker(
        "local/servers.py: AsyncServer.stop",
        "a thread of the program's event loop",
        "waits until the server has drained and ended",
        "the process",
        "the future of the thread",
    ),
    Worker(
        "client/__init__.py: _Loop.__init__",
        "`xlaserve client`, in a user's own program",
        "runs the event loop of a `Client` that is used by code without one",
        "the connection of the client",
        "a future",
    ),
    Worker(
        "artifact/sizes.py: ",
        "`estimate`",
        "walks through the StableHLO of a model for the mesh, which waits 0.1 s for it",
        "the module, nothing of the server",
        "a future",
    ),
    Worker(
        "runtime/trial.py: _run",
        "a process",
        "tries a model whose files a client has sent, before the server loads it",
        "the files, nothing of the server",
        "its exit status",
    ),
    Worker(
        "grpc/compression.py: compress",
        "asyncio's threads",
        "compresses a large answer",
        "the answer",
        "a future",
    ),
    Worker(
        "grpc/compression.py: decompress",
        "asyncio's threads",
        "inflates a large message",
        "the message",
        "a future",
    ),
    Worker(
        "http/dashboard/history_page.py: HistoryRoutes.show",
        "asyncio's threads",
        "adds up the hours that several processes have seen",
        "their snapshots",
        "a future",
    ),
    Worker(
        "http/dashboard/status_page.py: StatusRoutes.status",
        "asyncio's threads",
        "takes the models of a caller out of a status",
        "a reading",
        "a future",
    ),
    Worker(
        "http/dashboard/status_page.py: StatusRoutes._read",
        "asyncio's threads",
        "adds up the status of several processes",
        "their readings",
        "a future",
    ),
    Worker(
        "generation/slots.py: Slots.__init__",
        "`generate MODEL`, one for each generator",
        "computes prompts and steps of all slots of a language model",
        "the cache, the programs and the requests that have a slot",
        "`ModelRequest.answer`, which the outbox brings to the loop",
    ),
    Worker(
        "language/turns.py: CallerThread.__init__",
        "`text MODEL`, `grammars MODEL`, `tokens MODEL`, as a language model needs them",
        "makes tokens of prompts, compiles grammars, waits for a slow tokenizer; in callers' turns",
        "the tokenizer, and the requests until they wait for a slot",
        "`Slots.add`, the error of a request, or a future",
    ),
    Worker(
        "language/limited.py: _started",
        "processes of a model: for its chat template, grammars, and a tokenizer that may take long",
        "computes texts of clients within limits of time and memory, grammars and tokens in a fork",
        "texts of the request; no file, no socket, nothing of the server",
        "the text, on its pipe; it is killed when it takes too much",
    ),
    Worker(
        "process/output.py: _started",
        "a process for each server, unless stderr is a terminal",
        "reads what native code and child processes print on stdout and stderr",
        "a socket that stands for both, and the original stderr",
        "log records; it outlives a server that crashes",
    ),
    Worker(
        "process/output.py: _have_read",
        "`output`, a thread for that process",
        "restarts the process when it ends",
        "its exit status",
        "a log record",
    ),
    Worker(
        "runtime/programs/compilers/pool.py: CompilerProcesses._enqueue",
        "`compiler_N`",
        "starts a process that compiles for loads, asks it, and ends it when it is idle",
        "its pipes",
        "an event that the thread of a load waits for",
    ),
    Worker(
        "runtime/programs/compilers/process.py: CompilerProcess.__init__",
        "processes that compile: for loads at most `compile_processes`, niced behind the first "
        "model; of `xlaserve plan`",
        "lower, compile and serialize programs; killed when their load is cancelled or is late",
        "the artifact that they are sent; of `xlaserve plan` files of models, and a cache",
        "a program with its key and its sha256 on their standard output",
    ),
    Worker(
        "runtime/programs/compilers/process.py: CompilerProcess._watched",
        "a thread for each question to such a process",
        "kills it where its time, or what it may hold, is over, or where somebody has stopped it",
        "the id of the process",
        "nothing; the reader of its pipe learns of the end",
    ),
    Worker(
        "importers/onnx/watching.py: Watch.__init__",
        "`onnxruntime_watch`, a thread for each execution of onnxruntime at an import",
        "tells it to stop where its time, or its memory, is over",
        "the options of that execution",
        "nothing; the execution ends with an error",
    ),
    Worker(
        "offline/targets/compiling.py: Compilers.__init__",
        "one thread for each process below",
        "waits for a process that compiles",
        "its pipes",
        "a future",
    ),
    Worker(
        "cli/bench/command.py: bench",
        "the loop of `xlaserve bench`",
        "loads a server",
        "sockets",
        "-",
    ),
    Worker(
        "cli/bench/generate.py: measure_generation",
        "the loop of `xlaserve bench --generate`",
        "loads a generator",
        "sockets",
        "-",
    ),
    Worker("cli/health.py: health", "the loop of `xlaserve health`", "asks once", "a socket", "-"),
    Worker(
        "cli/asking/connection.py: ask_server",
        "the loop of `xlaserve infer`, `models` and `top`",
        "asks, or changes models",
        "a socket",
        "-",
    ),
)
