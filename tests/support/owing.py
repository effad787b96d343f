"""Every place in the server that creates a thread, task or future, and who awaits it."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xlaserve

MAKERS = (
    "Thread",
    "ThreadPoolExecutor",
    "Future",
    "create_task",
    "ensure_future",
    "create_future",
    "to_thread",
    "start_new_thread",
    "run_in_executor",
    "TaskGroup",
)
"""Functions that create threads, tasks or futures."""

CALLERS = (
    *("call_soon", "call_soon_threadsafe", "call_later", "call_at"),
    *("add_done_callback", "add_reader", "add_writer", "add_signal_handler"),
)
"""Functions that schedule callbacks, whose exceptions the event loop only logs."""

PROTOCOLS = ("Protocol", "BufferedProtocol", "DatagramProtocol", "SubprocessProtocol")
"""asyncio's protocol base classes; an exception in a callback closes the connection."""

NOT_THE_SERVER = ("bench", "cli", "client", "local", "testing")
"""Subpackages that are not part of the server."""


def _modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and syntax tree of each module of the server."""
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if module.split(".")[0] not in NOT_THE_SERVER:
            yield module, ast.parse(path.read_text())


def places(root: Path = Path(xlaserve.__file__).parent) -> Iterator[str]:
    """Yield each place as `module:Class.function`, found in the server's source."""
    for module, tree in _modules(root):
        for name in dict.fromkeys(_calls(tree, (), MAKERS)):
            yield f"{module}:{name}"


def callbacks(root: Path = Path(xlaserve.__file__).parent) -> Iterator[str]:
    """Yield each place that schedules a callback, and each asyncio protocol."""
    for module, tree in _modules(root):
        for name in dict.fromkeys((*_calls(tree, (), CALLERS), *_protocols(tree))):
            yield f"{module}:{name}"


def _protocols(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base == f"asyncio.{name}" for base in bases for name in PROTOCOLS):
                yield node.name


def _calls(node: ast.AST, within: tuple[str, ...], names: Sequence[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*within, child.name)
        if isinstance(child, ast.Call) and _name(child.func) in names:
            yield ".".join(inner)
        yield from _calls(child, inner, names)


def _name(called: ast.expr) -> str:
    while isinstance(called, ast.Subscript):
        called = called.value
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


PARTS = (
    *("concurrency", "residence", "serving", "net", "grpc", "grpc_web", "http", "openai"),
    *("language", "generation", "python_models", "workers"),
)
"""Subpackages with code whose results others await."""


def guards(root: Path = Path(xlaserve.__file__).parent) -> Iterator[str]:
    """Yield each `except Exception` in these parts; it does not catch panics (BaseException)."""
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for name in dict.fromkeys(_guards(ast.parse(path.read_text()), ())):
                yield f"{module}:{name}"


def _guards(node: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*within, child.name)
        if isinstance(child, ast.ExceptHandler) and child.type is not None:
            named = {one.id for one in ast.walk(child.type) if isinstance(one, ast.Name)}
            if "Exception" in named:
                yield ".".join(inner)
        yield from _guards(child, inner)


_OF_THREADS = "what a thread raises, which is an Exception by then"

UNGUARDED: Mapping[str, str] = {
    "residence.following:RepositoryFollower._load_logged": _OF_THREADS,
    "residence.following:RepositoryFollower.poll": _OF_THREADS,
    "residence.load_runner:LoadRunner._discard": _OF_THREADS,
    "residence.platforms.predictions:FileReader.__call__": _OF_THREADS,
    "serving.observability.gpus:Gpus._poll": _OF_THREADS,
    "serving.access.key_set:_key": "a key, which is not used; all else is raised",
    "serving.inputs.image_files:_refusing": "a fault of an image; all else is raised",
    "language.template_process:answer": "a template's fault, in its own process",
    "generation.exporting:_exported": "an export, which nobody waits for over a wire",
    "generation.slots:Slots._recover": "which error to tell; all else is raised",
    "python_models.loaded:close_all": "the end of a load that has failed",
    "python_models.outputs:OutputCheck._converted": "a fault of an output; all else is raised",
    "workers.control:Control.change.made": "settled in its `finally`, whatever is raised",
    "workers.fronts.front_end:FrontEnd._has_read": "what comes over a bridge, which is closed",
    "grpc.services.services:ServicesCodec.decode": "what is no message; all else is raised",
}
"""Accepted handlers, and why a panic that passes them leaves no caller waiting."""

ANSWERED: Mapping[str, tuple[str, ...]] = {
    "residence.platforms.predictions:FileReader.__init__": ("a look at files",),
    "serving.infer_call:AwaitedInfer.__init__": ("embeddings", "a step"),
    "python_models.nested:_One.__init__": ("nested",),
    "python_models.nested:NestedCalls.infer": ("nested",),
    "python_models.nested:NestedCalls.change": ("nested change",),
    "python_models.nested:NestedCalls.change.begin": ("nested change",),
    "python_models.nested:NestedCalls.is_ready": ("nested is_ready",),
    "serving.stations.by_itself:ByItself._compile_first": ("shapes",),
    "serving.stations.ensemble:Ensemble.begin": ("an ensemble", "a step"),
    "concurrency.sharing:SingleFlight.run": ("shapes", "a load"),
    "concurrency.device:DeviceThreads.__init__": (
        "dispatch",
        "device, fetched",
    ),
    "concurrency.host:HostThreads.run": (
        "host",
        "tokens",
        "completions",
        "responses",
    ),
    "concurrency.host:HostThreads._wake_one": (
        "host",
        "cached",
        "cached at once",
        "read in a thread",
        "written",
        "written, sent",
        "written, begun",
        "on the loop",
    ),
    "concurrency.limited:LimitedCall.__init__": ("load", "compile", "finish", "a load"),
    "concurrency.limited:LimitedCall.within": ("load", "compile", "finish", "a load"),
    "concurrency.limited:LimitedThreads._fill": ("load", "compile", "finish", "a load"),
    "concurrency.workers:Workers.__init__": ("wait", "fetch", "fetch_for"),
    "language.turns:CallerThread.__init__": ("turns", "a prompt", "a grammar"),
    "language.turns:CallerThread.submit": ("turns", "a prompt", "a grammar"),
    "generation.slots:Slots.__init__": ("a turn", "a mask", "a token"),
    "python_models.readiness:CodeReadiness.ask": ("is_ready",),
    "python_models.threads:PlainThread.__init__": ("a call", "code"),
    "python_models.threads:LoopThread.__init__": ("a task of a loop", "code, awaited"),
    "python_models.threads:LoopThread.start.begin": ("code, awaited",),
    "python_models.threads:wait_for": ("wait_for",),
    "python_models.process.copies:ProcessCopy.__init__": (
        "written to a process",
        "read from a process",
        "a process that starts",
    ),
    "runtime.programs.compilers.pool:CompilerProcesses._enqueue": ("a compiler",),
    "runtime.programs.program_store:ProgramStore._look_up": ("a program found",),
    "runtime.programs.program_store:ProgramStore.put": ("a program kept",),
    "workers.fronts.texts:Texts.read": ("a text of a front end",),
    "workers.link:Link._task": ("a reply", "a change"),
    "workers.link:Link._do": ("a change",),
    "storage.cache:ModelCache.__init__": ("a download",),
    "storage.http_store:HttpStore._list": ("a listing",),
    "grpc.handler:RequestHandler.accept": (
        "gRPC",
        "gRPC, read",
        "gRPC, written",
    ),
    "grpc.infer.infer_stream:InferStream.run": ("a stream", "a stream, written"),
    "grpc.infer.long_messages:LongMessages.await_for": (
        "inflated",
        "gRPC, compressed",
    ),
    "http.connection.connection:Connection._begin": (
        "REST",
        "JSON",
        "JSON, written",
        "events",
        "generate",
        "generate, streamed",
        "chat",
    ),
    "http.v2.fast_infer:FastInfer.answer_later": ("JSON in a thread",),
    "openai.embedding:Embeddings._executed": ("embeddings",),
    "http.connection.server:HttpServer._compress_later": ("JSON, compressed",),
}
"""Places with a waiting caller: the probes of test_owed_answers that panic there."""

_OF_OTHERS = "a place of this table that is told of sets it: "
_PARENT = "the process ends with it, and its parent has another"

NOT_ANSWERED: Mapping[str, str] = {
    "app.server:run": "the server ends with it",
    "app.beside:running_beside": "the server ends with it",
    "app.replacing:take_changes": "read by the function that begins it",
    "process.best_effort:BestEffortStream._enqueue": "lines of the log",
    "process.output:_start_reader": "lines of the log",
    "residence.reloads:Reloads._check_in_time": "a file that is read again, which the log tells of",
    "residence.capacity:Capacity.changed": f"{_OF_OTHERS}whoever gives memory back",
    "residence.finishing:Finisher.finish": "what a load leaves; the model is there",
    "residence.following:RepositoryFollower._each": "loads of a repository, one by one",
    "residence.load_runner:LoadRunner.run": "a load that nobody waits for any more",
    "residence.load_runner:LoadRunner._abandoned.ended": "memory of a load that was left",
    "residence.loading:VersionLoader.unload": "set in the `finally` of the same function",
    "residence.loading:VersionLoader._retire": "read by the function that begins it",
    "residence.loading:VersionLoader._free_later": "memory of a model that has left",
    "serving.access.control:AccessControl.reload": "keys, kept as they were",
    "serving.call:Call.writable": f"{_OF_OTHERS}the connection, and the end of the call",
    "serving.observability.gpus:Gpus.polling": "metrics, which are absent without it",
    "serving.observability.tracing:Tracing._begin_to_write": "traces",
    "concurrency.sharing:Coalesced.__call__": "awaited by the function that begins it",
    "concurrency.batches:BatchThread._hand_over": "spans and lines that nobody waits for",
    "concurrency.joining:ended": "the end of a pool, waited for within a limit",
    "concurrency.limited:LimitedCall.whenever": f"{_OF_OTHERS}the thread of the call",
    "runtime.programs.compilers.process:CompilerProcess._watched": (
        "ends the process that it watches"
    ),
    "importers.onnx.watching:Watch.__init__": "ends the process that it watches",
    "python_models.process.child:ChildCalls._ask": f"{_OF_OTHERS}the server's Services",
    "python_models.process.child:Child.run": "says what its code raised, or ends the process",
    "python_models.readiness:PresentReadiness.ask": "has its answer when it is made",
    "python_models.process.running:RunningProcess.__init__": "lines of the log",
    "python_models.triton.messages:InferenceRequest.async_exec": f"{_OF_OTHERS}nested calls",
    "artifact.sizes:": "read by the thread that begins it",
    "offline.targets.compiling:Compilers.__init__": "read by the thread that begins it",
    "process.predecessor:_readable": f"{_OF_OTHERS}the predecessor, or its end",
    "workers.fronts.engine:FrontEnds._open": "a connection, which ends with it",
    "workers.fronts.front_end:FrontEnd._take_revisions": "closes the bridge, and has another",
    "workers.fronts.mirror:Viewer.shows": f"{_OF_OTHERS}the front end, or its end",
    "workers.fronts.mirror:Mirror._leaves": "an instance that has left",
    "workers.link:Link.ask_all": f"{_OF_OTHERS}the parent, or its silence",
    "workers.link:Link._apply": "read by the function that begins it",
    "workers.link:Link._spooled": "read by the function that begins it",
    "workers.control:Control.replay_change": "read by the function that begins it",
    "workers.offload.offloading:Offloading.run": _PARENT,
    "workers.offload.offloading:Offloading._open": "a connection, which ends with it",
    "workers.parent:Supervisor.__init__": f"{_OF_OTHERS}the last worker to start, or its fault",
    "workers.parent:Supervisor.serve": "the parent ends with it",
    "workers.parent:Supervisor._run": "a process, which the parent replaces",
    "workers.parent:Supervisor._begin": "a change, which Control settles in a `finally`",
    "workers.parent:run": "the parent ends with it",
    "workers.parent_events:ParentEvents.read": f"{_OF_OTHERS}the parent, or a time",
    "workers.worker:_serve": _PARENT,
    "workers.worker_process:WorkerProcess.ended": "read by the task that begins it",
    "workers.worker_process:WorkerProcess.expect": f"{_OF_OTHERS}the worker, or its end",
    "app.successor:Successor._work": "a successor that fails, as the log tells",
    "app.successor:Successor._hand_over": "read by the function that begins it",
    "app.successor:Successor._failed": "a successor that fails, as the log tells",
    "net.accepting:Acceptor._accept_one": "a connection, which is closed with it",
    "net.accepting:Acceptor._await_bytes": f"{_OF_OTHERS}the client, or a time",
    "dialing.channel:_Connection.__init__": f"{_OF_OTHERS}the end of the connection",
    "grpc.engine.grpclib_stream:GrpclibStream._next": f"{_OF_OTHERS}the connection",
    "grpc.engine.grpclib_stream:GrpclibStream.send_data": f"{_OF_OTHERS}the connection",
    "grpc.compression:compress": "read by the function that begins it",
    "http.connection.connection:Connection.flushed": f"{_OF_OTHERS}the connection",
    "http.connection.held:Held._wait": f"{_OF_OTHERS}whoever gives memory back",
    "http.dashboard.history_page:HistoryRoutes.show": "read by the function that begins it",
    "http.connection.request_body:Body.read": f"{_OF_OTHERS}the connection",
    "http.dashboard.status_page:StatusRoutes._read": "read by the function that begins it",
    "http.dashboard.status_page:StatusRoutes.status": "read by the function that begins it",
}
"""All other places, and why no caller waits there."""

_STEP = "one step of the interpreter's or of asyncio: it sets, discards, closes, frees or releases"
_TIME = "the end of a time, which is of one call, and raises nothing: `Call.expire`"
_ITSELF = "has a guard around each of what it says, or reads a task that has ended"
_ENDS = "what it raises ends the connection: asyncio sees to that"
_NOTES = "lines, spans or pages that nobody waits for"
_AGAIN = "looks again at the next thing that happens, or at its next time"

CALLED: Mapping[str, tuple[str, ...] | str] = {
    "app.server:Application._stop": "the end of the server, which has a time of its own",
    "app.successor:Successor.start": "a successor that fails, as the log tells",
    "concurrency.completion:hand_over": ("load", "compile", "finish"),
    "concurrency.device:DeviceThreads.start": ("dispatch", "device, fetched"),
    "concurrency.device:DeviceThreads.start.ended": ("dispatch", "device, fetched"),
    "concurrency.host:HostThreads.cancel": ("host",),
    "concurrency.host:HostThreads._serve": ("host",),
    "concurrency.limited:LimitedCall.within": ("load", "compile", "finish"),
    "concurrency.limited:LimitedCall.whenever": _STEP,
    "concurrency.limited:_tell": ("load", "compile", "finish"),
    "concurrency.sharing:SingleFlight.run": _STEP,
    "generation.slots:Slots._pause": _STEP,
    "grpc.compression:compress": _STEP,
    "grpc.engine.h2_engine:_Stream._expect_progress": _AGAIN,
    "grpc.handler:RequestHandler.accept": ("gRPC",),
    "grpc.http2.protocol:Http2Protocol": _ENDS,
    "grpc.http2.protocol:Http2Protocol.connection_made": _ENDS,
    "grpc.http2.protocol:Http2Protocol.buffer_updated": ("a turn of HTTP/2",),
    "grpc.http2.protocol:Http2Protocol._let_go": _STEP,
    "grpc.http2.protocol:Http2Protocol.wake": ("a write of HTTP/2",),
    "grpc.http2.protocol:Http2Protocol._proceed": ("a turn of HTTP/2",),
    "grpc.http2.protocol:Http2Protocol._close": _STEP,
    "grpc.routes:_Moment.__init__": "the end of a moment, of one answer",
    "grpc.server:GrpcServer.admit": _ENDS,
    "http.connection.connection:Connection": _ENDS,
    "http.connection.connection:Connection.connection_made": "closes a connection that is idle",
    "http.connection.connection:Connection._check_timeouts": "closes a connection that is idle",
    "http.connection.connection:Connection._end": _STEP,
    "http.connection.fast_path:FastPath._await_body": "hands over to the general path, which waits",
    "http.connection.fast_path:FastPath._queue": ("a turn of HTTP/1.1",),
    "http.connection.fast_path:FastPath._finish": ("REST",),
    "http.v2.fast_infer:FastInferCall.write": ("JSON in a thread",),
    "net.accepting:Acceptor.__init__": "a connection, which is closed with it",
    "net.accepting:Acceptor._accept_one": _AGAIN,
    "net.accepting:Acceptor._accept_again": "a connection, which is closed with it",
    "net.accepting:Acceptor._await_bytes": _STEP,
    "net.rounds:Rounds.begin": ("a round",),
    "net.rounds:Rounds._go_on": ("a round",),
    "process.predecessor:_readable": _STEP,
    "process.signals:_call_at.post": "what a signal asks for, as the log tells",
    "process.signals:_end_by_the_next": "the next signal",
    "python_models.copies:_set_soon": _STEP,
    "python_models.nested:NestedCalls.change.begin": _STEP,
    "python_models.nested:NestedCalls._post": ("nested", "nested change"),
    "python_models.process.services:Services._await": _ITSELF,
    "python_models.threads:LoopThread.submit": ("a task of a loop",),
    "python_models.threads:LoopThread.start.begin": _STEP,
    "residence.finishing:Finisher.finish": _STEP,
    "residence.load_runner:LoadRunner.run": _STEP,
    "residence.load_runner:LoadRunner._abandoned.ended": _STEP,
    "residence.load_runner:LoadRunner._load_now.on_stage": _NOTES,
    "residence.loading:VersionLoader._correct_soon": "sizes, corrected at the next change too",
    "residence.loading:VersionLoader._retire": _STEP,
    "residence.loading:VersionLoader._free_later": _STEP,
    "residence.measured:MeasuredMemory.changed": "sizes, corrected at the next change too",
    "residence.repository.remote.fetched:FetchedFiles.fetch": _STEP,
    "serving.access.control:AccessControl.reload": _STEP,
    "serving.call:Call.expire_in_time": _TIME,
    "serving.observability.access_log:AccessLog.ended": _NOTES,
    "serving.observability.access_log:AccessLog._await_flush": _NOTES,
    "serving.observability.access_log:AccessLog._flush": _NOTES,
    "serving.observability.tracing:Tracing._keep_span": _NOTES,
    "serving.observability.tracing:Tracing._picked": _NOTES,
    "serving.observability.tracing:Tracing._keep": _NOTES,
    "serving.stations.batches:LoopClock.soon": ("a batch",),
    "serving.stations.batches:LoopClock.at": ("a batch",),
    "serving.stations.by_itself:ByItself._compile_first": ("shapes",),
    "serving.stations.deadlock:Waits.watch": "looks for a deadlock, which a deadline ends too",
    "serving.stations.deadlock:Waits._check": "looks for a deadlock, which a deadline ends too",
    "serving.stations.direct:DirectQueue.submit": ("code",),
    "serving.stations.dispatch:Dispatcher._start": "the end of the server's threads",
    "serving.stations.ensemble:Ensemble.begin": ("an ensemble",),
    "serving.stations.generator:Generator._expire_in_time": _TIME,
    "serving.stations.health:Watch.saw": _AGAIN,
    "serving.stations.health:Health._schedule_check": _AGAIN,
    "serving.stations.outbox:Outbox._wake": ("what copies hand back",),
    "serving.stations.outbox:Outbox._deliver": ("what copies hand back",),
    "serving.stations.overruns:Overruns._judge": _AGAIN,
    "serving.stations.together:Line.add": ("answers that are computed together",),
    "serving.stations.together:Line.cancel": _STEP,
    "workers.fronts.bridge:Bridge": _ENDS,
    "workers.fronts.bridge:Bridge.say": _ITSELF,
    "workers.fronts.bridge:Bridge.watch_drops": _AGAIN,
    "workers.fronts.bridge:Bridge._drop": _AGAIN,
    "workers.fronts.engine:FrontEnds._open": _STEP,
    "workers.fronts.front_end:FrontEnd._take_revisions": "closes the bridge, and has another",
    "workers.fronts.mirror:Mirror._schedule": "what front ends show, said again at the next change",
    "workers.fronts.mirror:Mirror._leaves": _STEP,
    "workers.handing:readable": _STEP,
    "workers.handing:Handing.__init__": "a connection, which is closed with it",
    "workers.handing:Handing._pause": _AGAIN,
    "workers.handing:Handing._resume": "a connection, which is closed with it",
    "workers.link:Link._spooled": _STEP,
    "workers.link:Link.heard": ("a change",),
    "workers.link:Link._task": _ITSELF,
    "workers.offload.offloading:Offloading._open": _STEP,
    "workers.offload.peer:Peer.give": _TIME,
    "workers.parent:Supervisor._begin": _STEP,
    "workers.worker:_serve": "the process ends with it, and its parent has another",
}
"""Callbacks and protocols: the probes that panic there, or why no caller waits."""
