"""Every place of the server that makes a thread, a task or a future, and who is answered there."""

import ast
from collections.abc import Iterator, Mapping
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
"""Names of what makes one."""

NOT_THE_SERVER = ("benchmark", "cli", "client", "client_memory", "client_trees", "client_values")
"""Parts of the package that ask servers."""


def places(root: Path = Path(xlaserve.__file__).parent) -> Iterator[str]:
    """Yield each place as `module:Class.function`, as the code of the server has them."""
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if module.split(".")[0] not in NOT_THE_SERVER:
            for name in dict.fromkeys(_makers(ast.parse(path.read_text()), ())):
                yield f"{module}:{name}"


def _makers(node: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*within, child.name)
        if isinstance(child, ast.Call) and _name(child.func) in MAKERS:
            yield ".".join(inner)
        yield from _makers(child, inner)


def _name(called: ast.expr) -> str:
    while isinstance(called, ast.Subscript):
        called = called.value
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


PARTS = ("core", "language", "models/generation", "models/python", "processes", "transport")
"""Where code runs that others wait for."""


def guards(root: Path = Path(xlaserve.__file__).parent) -> Iterator[str]:
    """Yield the place of each `except Exception` there, which lets panics pass."""
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
    "core.residence.following:RepositoryFollower._load_logged": _OF_THREADS,
    "core.residence.following:RepositoryFollower.poll": _OF_THREADS,
    "core.residence.load_runner:LoadRunner._discard": _OF_THREADS,
    "core.residence.predictions:FilesLook.__call__": _OF_THREADS,
    "core.serving.access.key_set:_key": "a key, which is not used; all else is raised",
    "core.serving.image_files:_refusing": "a fault of an image; all else is raised",
    "language.template_process:answer": "a template's fault, in its own process",
    "models.generation.exporting:_exported": "an export, which nobody waits for over a wire",
    "models.generation.slots:Slots._recover": "which error to tell; all else is raised",
    "models.python.loaded:close_all": "the end of a load that has failed",
    "models.python.outputs:OutputCheck._converted": "a fault of an output; all else is raised",
    "models.python.process.copies:ProcessCopy._life": "a fault of a process, which is ended anyway",
    "processes.control:Control.change": "settled in its `finally`, whatever is raised",
    "processes.fronts.front_end:FrontEnd._has_read": "what comes over a bridge, which is closed",
    "transport.grpc.services:ServicesCodec.decode": "what is no message; all else is raised",
}
"""Those that stay, and why nobody is left waiting by what they let pass."""

ANSWERED: Mapping[str, tuple[str, ...]] = {
    "core.residence.predictions:FilesLook.__init__": ("a look at files",),
    "core.serving.infer_call:AwaitedInfer.__init__": ("embeddings", "a step"),
    "core.serving.nested:_One.__init__": ("nested",),
    "core.serving.nested:NestedCalls.infer": ("nested",),
    "core.serving.nested:NestedCalls.change": ("nested change",),
    "core.serving.nested:NestedCalls.change.begin": ("nested change",),
    "core.serving.nested:NestedCalls.is_ready": ("nested is_ready",),
    "core.serving.stations.by_itself:ByItself._compile_first": ("shapes",),
    "core.serving.stations.ensemble:Ensemble.begin": ("an ensemble", "a step"),
    "core.sharing:SingleFlight.run": ("shapes", "a load"),
    "core.threads.device:DeviceThreads.__init__": (
        "dispatch",
        "device, fetched",
    ),
    "core.threads.host:HostThreads.run": (
        "host",
        "tokens",
        "completions",
    ),
    "core.threads.host:HostThreads._wake_one": (
        "host",
        "cached",
        "cached at once",
        "read in a thread",
        "written",
        "on the loop",
    ),
    "core.threads.limited:LimitedCall.__init__": ("load", "compile", "finish", "a load"),
    "core.threads.limited:LimitedCall.within": ("load", "compile", "finish", "a load"),
    "core.threads.limited:LimitedThreads._fill": ("load", "compile", "finish", "a load"),
    "core.threads.workers:Workers.__init__": ("wait", "fetch", "fetch_for"),
    "language.turns:CallerThread.__init__": ("turns", "a prompt", "a grammar"),
    "language.turns:CallerThread.submit": ("turns", "a prompt", "a grammar"),
    "models.generation.slots:Slots.__init__": ("a turn", "a mask", "a token"),
    "models.python.readiness:CodeReadiness.ask": ("is_ready",),
    "models.python.threads:PlainThread.__init__": ("a call", "code"),
    "models.python.threads:LoopThread.__init__": ("a task of a loop", "code, awaited"),
    "models.python.threads:LoopThread.start.begin": ("code, awaited",),
    "models.python.threads:wait_for": ("wait_for",),
    "processes.fronts.texts:Texts.read": ("a text of a front end",),
    "processes.link:Link._task": ("a reply", "a change"),
    "processes.link:Link._do": ("a change",),
    "transport.grpc.handler:RequestHandler.accept": (
        "gRPC",
        "gRPC, read",
        "gRPC, written",
    ),
    "transport.grpc.infer_stream:InferStream.run": ("a stream", "a stream, written"),
    "transport.grpc.long_messages:LongMessages.await_for": (
        "inflated",
        "gRPC, compressed",
    ),
    "transport.rest.connection:Connection._begin": (
        "REST",
        "JSON",
        "JSON, written",
        "events",
        "generate",
        "generate, streamed",
        "chat",
    ),
    "transport.rest.fast_infer:FastInfer.answer_later": ("JSON in a thread",),
    "transport.rest.openai.embedding:Embeddings._executed": ("embeddings",),
    "transport.rest.server:HttpServer._compress_later": ("JSON, compressed",),
}
"""Where somebody waits for an answer: the probes of test_owed_answers that panic there."""

_OF_OTHERS = "a place of this table that is told of sets it: "
_PARENT = "the process ends with it, and its parent has another"

NOT_ANSWERED: Mapping[str, str] = {
    "app:run": "the server ends with it",
    "assembly.beside:running_beside": "the server ends with it",
    "assembly.replacing:take_changes": "read by the function that begins it",
    "best_effort:BestEffortStream._enqueue": "lines of the log",
    "core.reloads:Reloads._look_in_time": "a file that is read again, which the log tells of",
    "core.residence.capacity:Capacity.changed": f"{_OF_OTHERS}whoever gives memory back",
    "core.residence.finishing:Finisher.finish": "what a load leaves; the model is there",
    "core.residence.following:RepositoryFollower._each": "loads of a repository, one by one",
    "core.residence.load_runner:LoadRunner.run": "a load that nobody waits for any more",
    "core.residence.load_runner:LoadRunner._abandoned.ended": "memory of a load that was left",
    "core.residence.loading:VersionLoader.unload": "set in the `finally` of the same function",
    "core.residence.loading:VersionLoader._retire": "read by the function that begins it",
    "core.residence.loading:VersionLoader._free_later": "memory of a model that has left",
    "core.serving.access.control:AccessControl.reload": "keys, kept as they were",
    "core.serving.call:Call.writable": f"{_OF_OTHERS}the connection, and the end of the call",
    "core.serving.tracing:Tracing._begin_to_write": "traces",
    "core.sharing:Coalesced.__call__": "awaited by the function that begins it",
    "core.threads.batches:BatchThread._hand_over": "spans and lines that nobody waits for",
    "core.threads.joining:ended": "the end of a pool, waited for within a limit",
    "core.threads.limited:LimitedCall.whenever": f"{_OF_OTHERS}the thread of the call",
    "models.compilers.pool:CompilerProcesses._enqueue": "each task is failed with what is raised",
    "models.compilers.process:CompilerProcess._watched": "ends the process that it watches",
    "models.onnx.watching:Watch.__init__": "ends the process that it watches",
    "models.program_store:ProgramStore._looked": "a program, which is compiled without it",
    "models.program_store:ProgramStore.put": "a program, which the next one compiles",
    "models.python.process.child:ChildCalls._ask": f"{_OF_OTHERS}the server's Services",
    "models.python.process.child:Child.run": "says what its code raised, or ends the process",
    "models.python.process.copies:ProcessCopy.__init__": "ends the process, whose requests fail",
    "models.python.readiness:PresentReadiness.ask": "has its answer when it is made",
    "models.python.process.running:RunningProcess.__init__": "lines of the log",
    "models.python.triton.messages:InferenceRequest.async_exec": f"{_OF_OTHERS}nested calls",
    "models.sizes:": "read by the thread that begins it",
    "models.storage.cache:ModelCache.__init__": "read by the thread that begins it",
    "models.storage.http_store:HttpStore.objects": "read by the thread that begins it",
    "models.targets.compiling:Compilers.__init__": "read by the thread that begins it",
    "predecessor:_readable": f"{_OF_OTHERS}the predecessor, or its end",
    "processes.fronts.engine:FrontEnds._open": "a connection, which ends with it",
    "processes.fronts.front_end:FrontEnd._take_revisions": "closes the bridge, and has another",
    "processes.fronts.mirror:Viewer.shows": f"{_OF_OTHERS}the front end, or its end",
    "processes.fronts.mirror:Mirror._leaves": "an instance that has left",
    "processes.link:Link.ask_all": f"{_OF_OTHERS}the parent, or its silence",
    "processes.link:Link._apply": "read by the function that begins it",
    "processes.link:Link._spooled": "read by the function that begins it",
    "processes.control:Control.make_again": "read by the function that begins it",
    "processes.offload.offloading:Offloading.run": _PARENT,
    "processes.offload.offloading:Offloading._open": "a connection, which ends with it",
    "processes.parent:Supervisor.__init__": f"{_OF_OTHERS}the last worker to start, or its fault",
    "processes.parent:Supervisor.serve": "the parent ends with it",
    "processes.parent:Supervisor._run": "a process, which the parent replaces",
    "processes.parent:Supervisor._begin": "a change, which Control settles in a `finally`",
    "processes.parent:run": "the parent ends with it",
    "processes.parent_events:ParentEvents.read": f"{_OF_OTHERS}the parent, or a time",
    "processes.worker:_serve": _PARENT,
    "processes.worker_process:WorkerProcess.ended": "read by the task that begins it",
    "processes.worker_process:WorkerProcess.expect": f"{_OF_OTHERS}the worker, or its end",
    "successor:Successor._work": "a successor that fails, as the log tells",
    "successor:Successor._hand_over": "read by the function that begins it",
    "successor:Successor._failed": "a successor that fails, as the log tells",
    "transport.accepting:Acceptor._accept_one": "a connection, which is closed with it",
    "transport.accepting:Acceptor._heard": f"{_OF_OTHERS}the client, or a time",
    "transport.grpc.channel:_Connection.__init__": f"{_OF_OTHERS}the end of the connection",
    "transport.grpc.grpclib_stream:GrpclibStream._wait": f"{_OF_OTHERS}the connection",
    "transport.grpc.grpclib_stream:GrpclibStream.send_data": f"{_OF_OTHERS}the connection",
    "transport.grpc.compression:compress": "read by the function that begins it",
    "transport.rest.connection:Connection.flushed": f"{_OF_OTHERS}the connection",
    "transport.rest.held:Held._wait": f"{_OF_OTHERS}whoever gives memory back",
    "transport.rest.history_page:HistoryRoutes.show": "read by the function that begins it",
    "transport.rest.request_body:Body.read": f"{_OF_OTHERS}the connection",
    "transport.rest.status_page:StatusRoutes.status": "read by the function that begins it",
}
"""The others, and why nobody waits there for what is raised."""
