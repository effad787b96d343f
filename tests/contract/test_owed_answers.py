"""Panics (BaseException) never leave a caller waiting, and the next request is answered.

`PanicException`, raised for panics in Rust libraries, is one: `except Exception` does not catch it.
"""

import asyncio
import importlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import identity_models, python_models, scripted_language, tiny_embedding
from support.asking import given
from support.conditions import until
from support.doubling import export_double
from support.engines import own_engine_only
from support.http import ask, connect, message
from support.owing import ANSWERED, CALLED, NOT_ANSWERED, UNGUARDED, callbacks, guards, places
from support.server import RunningServer, serving
from tritonclient.utils import InferenceServerException

import xlaserve
from xlaserve.concurrency.control_plane import ChangeKind, ChangeText
from xlaserve.concurrency.device import DeviceThreads
from xlaserve.concurrency.host import HostThreads
from xlaserve.concurrency.limited import Beat
from xlaserve.concurrency.workers import Workers
from xlaserve.language.turns import CallerThread
from xlaserve.net.rounds import Rounds
from xlaserve.python_models.readiness import CodeReadiness
from xlaserve.python_models.threads import LoopThread, PlainThread, wait_for
from xlaserve.residence.platforms.predictions import FileReader, FilesSeen
from xlaserve.runtime.programs.compilation_cache import Entry
from xlaserve.runtime.programs.compilers.pool import CompilerProcesses, Limits
from xlaserve.runtime.programs.program_store import ProgramStore
from xlaserve.serving.stations.batching import BatchQueue
from xlaserve.serving.stations.outbox import Outbox
from xlaserve.storage.cache import ModelCache
from xlaserve.storage.http_store import HttpStore
from xlaserve.workers.fronts import texts
from xlaserve.workers.link import Link
from xlaserve.workers.messages import Do, Question

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAID = "Panic: a library has given up"


class Panic(BaseException):
    """Like the exception that PyO3 raises when Rust code panics."""


def panicking(*given: Any, **named: Any) -> Any:
    raise Panic("a library has given up")


# --- Through the server's protocols --------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    server: RunningServer
    grpc: Any
    numbers: "count[int]"
    """Makes every request unique."""

    async def rest(self, method: str, path: str, body: Any = None, *headers: Any) -> str:
        data = b"" if body is None else json.dumps(body).encode()
        answer = await ask(str(self.server.http), method, path, *headers, body=data)
        return "OK" if answer.status == 200 else f"{answer.status}: {answer.body.decode()}"

    async def events(self, path: str, body: Any) -> str:
        """Request events; an error may come after the HTTP status was sent."""
        accept = {"Accept": "text/event-stream"}
        async with (
            aiohttp.ClientSession(headers=accept) as session,
            session.post(f"http://{self.server.http}{path}", json=body) as answer,
        ):
            text = await answer.text()
        return "OK" if answer.ok and '"error"' not in text else f"500: {text}"

    async def infer(self, model: str, name: str = "x", array: Any = None, **how: Any) -> str:
        array = np.ones((1, 2), np.float32) if array is None else array
        return await told(self.grpc.infer(model, [given(triton, name, array)], **how))

    async def stream(self, model: str) -> str:
        async def sent() -> AsyncIterator[dict[str, Any]]:
            inputs = [given(triton, "x", np.ones((1, 2), np.float32))]
            # An unknown form, so that the message is decoded.
            other = {f"n{next(self.numbers)}": 1}
            yield {"model_name": model, "inputs": inputs, "parameters": other}

        async def read() -> None:
            async for _, error in self.grpc.stream_infer(sent()):
                if error is not None:
                    raise error

        return await told(read())


async def told(answer: Awaitable[Any]) -> str:
    try:
        await answer
    except InferenceServerException as error:
        # A stream shows statuses only to clients that ask for them.
        return f"{error.status() or 'StatusCode.INTERNAL'}: {error.message()}"
    return "OK"


CODE = """
class Model(PythonModel):
    def load(self, context):
        self.context = context

    {how} infer(self, inputs):
        return self.made(inputs)

    def made(self, inputs):
        {body}
"""


def total(params: Any, x: Any) -> Any:
    return {"y": x.sum(axis=1)}


TRITON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.{does}
        found = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one)]) for one in found]
"""


def write(root: Path) -> None:
    """Write the models of a repository."""
    export_double(root)
    inputs = {"x": ("FP32", [-1, "s"])}
    how: dict[str, Any] = {"max_batch_size": 2, "max_on_demand_shapes": 2}
    xlaserve.export_model(total, None, inputs, root / "open" / "1", **how)
    identity_models.write(root, "texts", "BYTES")
    scripted_language.export(root / "story", ["ab"], scripted_language.HERMES, grammars="true")
    tiny_embedding.export(root / "words")
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    shapes: dict[str, Any] = {
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    step = {"model_name": "double", "model_version": -1}
    step |= {"input_map": {"x": "x"}, "output_map": {"y": "y"}}
    config = shapes | {"platform": "ensemble", "ensemble_scheduling": {"step": [step]}}
    (root / "chain" / "1").mkdir(parents=True)
    (root / "chain" / "config.json").write_text(json.dumps(config))
    tensor["dims"] = [-1, -1]
    for name, kept in (("cached", True), ("wide", False)):
        sizes: dict[str, Any] = {
            "backend": "identity",
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
            "response_cache": {"enable": kept},
        }
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(sizes))
    bodies = {
        "code": "return {'y': inputs['x']}",
        "nested": "return self.context.infer_and_wait('double', inputs)",
    }
    tensors = python_models.VECTORS.replace("[ -1 ]", "[ 1, 2 ]")
    for name, body in bodies.items():
        python_models.write(root, name, CODE.format(how="def", body=body), tensors)
    body = "return {'y': np.ones(1 << 15, np.float32)}"
    grows = CODE.format(how="def", body=body)
    python_models.write(root, "grows", grows, python_models.VECTORS)
    awaited = CODE.format(how="async def", body=bodies["code"])
    python_models.write(root, "awaited", awaited, tensors)
    apart = 'parameters { key: "execution" value { string_value: "process" } }'
    python_models.write(root, "apart", CODE.format(how="def", body=bodies["code"]), tensors + apart)
    identity_models.write(root, "spare", "FP32")
    asked = {"asks": "is_model_ready('double')", "changes": "load_model('double')"}
    for name, does in asked.items():
        python_models.write(root, name, TRITON.format(does=does), tensors, begin="")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory, programs: str) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("owing")
    await asyncio.to_thread(write, folder / "models")
    names = [path.name for path in (folder / "models").iterdir()]
    async with (
        serving(
            folder,
            folder / "models",
            load_model=tuple(names),
            http_endpoint="port:0",
            allow_python_models=True,
            response_cache_bytes=1 << 20,
            compilation_cache_directory=programs,
            # A slow call would be repeated on a thread, which would get the panic.
            inline_execution_seconds=60,
        ) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Place(server, client, count(1))


Ask = Callable[[Place], Awaitable[str]]


@dataclass(frozen=True)
class Door:
    """A function that panics once, by module and name, and a request that calls it."""

    target: str
    ask: Ask
    text: str = "internal error"
    again: str = "OK"
    """Status of the next request, after the effects of the first."""


def infer(model: str, **how: Any) -> Ask:
    return lambda place: place.infer(model, **how)


def rest(method: str, path: str, body: Any = None, *headers: Any) -> Ask:
    return lambda place: place.rest(method, path, body, *headers)


def numbers(rows: int = 1) -> dict[str, Any]:
    data = [1.0] * 2 * rows
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 2], "data": data}]}


def short_text(place: Place) -> Awaitable[str]:
    return place.infer("texts", array=A_TEXT)


def many_texts(place: Place) -> Awaitable[str]:
    """Send a message long enough to be decoded, and answered, on threads."""
    return place.infer("texts", array=np.array([b"a"] * 5000, np.object_))


def opened(place: Place) -> Awaitable[str]:
    """Request a new shape."""
    return place.infer("open", array=np.ones((1, next(place.numbers) + 1), np.float32))


def not_cached(place: Place) -> Awaitable[str]:
    return place.infer("cached", array=np.full((1, 1 << 17), next(place.numbers), np.float32))


def prompted(place: Place) -> Awaitable[str]:
    text = np.array([b"a0"], np.object_)
    return place.infer("story", "text", text, parameters={"max_tokens": 2})


def with_grammar(place: Place) -> Awaitable[str]:
    more = {"regex": f"ab|b{{{next(place.numbers)}}}", "max_tokens": 2}
    return place.infer("story", "tokens", np.array([48], np.int32), parameters=more)


async def in_process(place: Place) -> str:
    """Call code in a process, which is restarted if it was lost."""
    while (answered := await place.infer("apart")).startswith("StatusCode.UNAVAILABLE"):
        await asyncio.sleep(0.01)
    return answered


async def loaded(place: Place) -> str:
    await place.grpc.unload_model("spare")
    return await told(place.grpc.load_model("spare"))


COMPLETION = {"model": "story", "prompt": "a0", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "story", "messages": [{"role": "user", "content": "0"}], "max_tokens": 2}
ONE = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
GENERATE = {"text": "a0", "parameters": {"max_tokens": 2}}
EMBEDDED = {"model": "words", "input": ["ab", "ba"] * 5}
LONG, A_TEXT = np.ones((1, 2000), np.float32), np.array([b"a" * 100], np.object_)
GZIP = ("Accept-Encoding", "gzip")
OF_CODE = f"model 'MODEL': {SAID}"

DOORS: Mapping[str, Door] = {
    "gRPC": Door(
        "xlaserve.grpc.services.inference:InferenceService.server_metadata",
        lambda place: told(place.grpc.get_server_metadata()),
    ),
    "gRPC, read": Door("xlaserve.grpc.infer.infer_fast_path:InferFastPath._decoded", short_text),
    "gRPC, written": Door(
        "xlaserve.grpc.infer.infer_fast_path:FastPathCall._encode", infer("double")
    ),
    "gRPC, compressed": Door(
        "xlaserve.grpc.compression:compression.deflate_where_worth",
        lambda place: told(
            place.grpc.infer("wide", [given(triton, "x", LONG)], compression_algorithm="gzip")
        ),
    ),
    "inflated": Door(
        "xlaserve.grpc.infer.infer_fast_path:decompress",
        lambda place: place.infer("texts", array=A_TEXT, compression_algorithm="gzip"),
    ),
    "a stream": Door(
        "xlaserve.grpc.infer.infer_stream:InferStream._read", lambda place: place.stream("double")
    ),
    "a stream, written": Door(
        "xlaserve.grpc.infer.stream_answers:StreamAnswers.write",
        lambda place: place.stream("double"),
    ),
    "read in a thread": Door("xlaserve.grpc.infer.long_messages:read_long", many_texts),
    "written": Door("xlaserve.grpc.infer.infer_fast_path:FastPathCall._long_parts", many_texts),
    "written, sent": Door(
        "xlaserve.grpc.infer.infer_fast_path:InferFastPath.send_written", many_texts
    ),
    "written, begun": Door("xlaserve.grpc.infer.long_messages:Writing.begin", many_texts),
    "REST": Door("xlaserve.http.v2.statistics:_statistics", rest("GET", "/v2/models/double/stats")),
    "JSON": Door(
        "xlaserve.http.v2.fast_infer:read_infer_request",
        rest("POST", "/v2/models/double/infer", numbers()),
    ),
    "JSON, written": Door(
        "xlaserve.http.v2.fast_infer:write_infer_answer",
        rest("POST", "/v2/models/double/infer", numbers()),
    ),
    "JSON in a thread": Door(
        "xlaserve.http.v2.fast_infer:write_infer_answer",
        rest("POST", "/v2/models/grows/infer", ONE),
    ),
    "JSON, compressed": Door(
        "xlaserve.http.connection.server:deflate_where_worth",
        rest("POST", "/v2/models/wide/infer", numbers(512), GZIP),
    ),
    "events": Door(
        "xlaserve.http.events:_event",
        lambda place: place.events("/v2/models/double/infer", numbers()),
    ),
    "generate, streamed": Door(
        "xlaserve.http.v2.generate:_event",
        lambda place: place.events("/v2/models/story/generate_stream", GENERATE),
    ),
    "generate": Door(
        "xlaserve.http.v2.generate:GenerateRoutes._write",
        rest("POST", "/v2/models/story/generate", GENERATE),
    ),
    "chat": Door(
        "xlaserve.language.text:LanguageText.chat", rest("POST", "/v1/chat/completions", CHAT)
    ),
    "completions": Door(
        "xlaserve.openai.routes:count_octets", rest("POST", "/v1/completions", COMPLETION)
    ),
    "responses": Door(
        "xlaserve.openai.response_asking:_messages",
        rest("POST", "/v1/responses", {"model": "story", "input": "a"}),
    ),
    "embeddings": Door(
        "xlaserve.openai.embedding:batches.tensors", rest("POST", "/v1/embeddings", EMBEDDED)
    ),
    "tokens": Door(
        "xlaserve.language.tokenizing:Tokens.encode", rest("POST", "/v1/embeddings", EMBEDDED)
    ),
    "an ensemble": Door("xlaserve.serving.stations.ensemble:_times", infer("chain")),
    "a step": Door("OF double:execute", infer("chain")),
    "on the loop": Door("OF double:execute", infer("double")),
    "cached": Door("xlaserve.serving.stations.caching:key_of", not_cached),
    "cached at once": Door("xlaserve.serving.stations.caching:key_of", infer("cached")),
    "shapes": Door("xlaserve.runtime.programs.on_demand:OnDemandShapes.compile", opened),
    "a prompt": Door("xlaserve.language.text:LanguageText.encode", prompted),
    "a grammar": Door("xlaserve.language.grammars:Grammars.compile", with_grammar),
    "a mask": Door("xlaserve.language.grammars:Place.fill", with_grammar),
    "a turn": Door("xlaserve.generation.batch:Batch.prefill", prompted, f"a step failed: {SAID}"),
    "a token": Door("xlaserve.generation.running:Running.take", prompted),
    "a load": Door("xlaserve.runtime.loaders:_loaded", loaded),
    "code": Door("OF code:made", infer("code"), f"model 'code': {SAID}"),
    "code, awaited": Door("OF awaited:made", infer("awaited"), f"model 'awaited': {SAID}"),
    "written to a process": Door("xlaserve.python_models.process.copies:on_host", in_process),
    "read from a process": Door(
        "xlaserve.python_models.process.copies:ProcessCopy._on_answer",
        in_process,
        "its process was lost while it executed this request",
    ),
    "nested": Door(
        "xlaserve.python_models.nested:_request", infer("nested"), f"model 'nested': {SAID}"
    ),
    "nested is_ready": Door(
        "xlaserve.serving.engine:Engine.resolve", infer("asks"), f"model 'asks': {SAID}"
    ),
    "nested change": Door("NESTED:_make_change", infer("changes"), f"model 'changes': {SAID}"),
}


def panics_once(target: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a function panic on its first call; return a list that records it."""
    module, _, names = target.partition(":")
    owner: Any
    only: Any = None
    if module == "NESTED":
        owner, name = place.server.application._nested, names
    elif module.startswith("OF "):
        runner: Any = place.server.application.registry.resolve(module[3:])[1].runner
        owner, name = type(runner._copies[0]._model if names == "made" else runner), names
        # Warm-ups execute other models of its class as well.
        only = None if names == "made" else runner
    else:
        owner = importlib.import_module(module)
        *within, name = names.split(".")
        for one in within:
            owner = getattr(owner, one)
    inner, called = inspect.getattr_static(owner, name, None), list[str]()
    call = getattr(owner, name)

    def once(*given: Any, **named: Any) -> Any:
        if not called and (only is None or given[0] is only):
            called.append(target)
            raise Panic("a library has given up")
        return call(*given, **named)

    is_static = isinstance(inner, staticmethod)
    monkeypatch.setattr(owner, name, staticmethod(once) if is_static else once)
    return called


@own_engine_only
@pytest.mark.parametrize("door", DOORS)
async def test_a_panic_is_answered_and_so_is_the_next_request(
    place: Place, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = DOORS[door]
    assert "OK" == await asked.ask(place), "before"
    called = panics_once(asked.target, place, monkeypatch)
    async with asyncio.timeout(60):
        panicked = await asked.ask(place)
        again = await asked.ask(place)

    assert [asked.target] == called
    assert panicked.startswith(("500: ", "StatusCode.INTERNAL: "))
    assert asked.text in panicked
    assert asked.again == again


class Outcomes:
    """Records the outcomes of calls (an Observer)."""

    began = None

    def __init__(self) -> None:
        self.found: list[Any] = []

    def ended(self, calls: Any, outcome: Any) -> None:
        self.found += [outcome] * len(calls)


FAILED_STREAMS = {
    "generate": (
        "xlaserve.http.v2.generate:_event",
        "/v2/models/story/generate_stream",
        {"text": "a0", "parameters": {"max_tokens": 2}},
    ),
    "chat": (
        "xlaserve.openai.choices:Choice.take",
        "/v1/chat/completions",
        CHAT | {"stream": True},
    ),
}


@own_engine_only
@pytest.mark.parametrize("of", FAILED_STREAMS)
async def test_a_stream_that_fails_behind_its_first_event_has_failed(
    of: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For call observers, although the status OK was already sent."""
    target, path, body = FAILED_STREAMS[of]
    module, _, names = target.partition(":")
    owner: Any = importlib.import_module(module)
    *within, name = names.split(".")
    for one in within:
        owner = getattr(owner, one)
    call, called = getattr(owner, name), list[str]()

    def second(*given: Any, **named: Any) -> Any:
        called.append(target)
        return panicking() if len(called) == 2 else call(*given, **named)

    noting, gates = Outcomes(), place.server.application.gates
    gates.observe(noting)
    try:
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, second)
            failed = await place.events(path, body)
        await until(lambda: len(noting.found) == 1)
        again = await place.events(path, body)
    finally:
        gates.observe_no_more(noting)

    assert failed.startswith("500: ")
    assert isinstance(noting.found[0], Panic)
    assert "OK" == again


# --- Threads and tasks in isolation --------------------------------------------------------------


def good() -> str:
    return "good"


class Threads:
    """Everything that runs given functions on threads."""

    def __init__(self) -> None:
        self.workers = Workers(load_threads=1, execute_threads=1)
        self.host = HostThreads(1)
        self.device = DeviceThreads("cpu:0")
        self.turns = CallerThread("turns")
        self.reader = FileReader()
        self.compilers = CompilerProcesses(Limits(1, 1 << 30, 60, 60))
        nowhere: Any = None
        self.programs = ProgramStore("s3://a/b", nowhere, seconds=60, max_bytes=1 << 20)
        self.plain, self.loop = PlainThread("plain"), LoopThread("loop")

    def close(self) -> None:
        self.workers.close()
        self.host.close()
        self.device.close()
        self.turns.close()
        self.reader.close()
        self.compilers.close()
        self.programs.close(60)
        self.plain.close()
        self.loop.close()

    async def compiled(self, call: Callable[[], Any]) -> Any:
        """Return a compile process's result for a job, which the call returns."""

        def do(task: Any, process: Any) -> None:
            task.succeed(call())

        self.compilers._do = do  # type: ignore[method-assign]
        job: Any = None
        return await asyncio.to_thread(self.compilers.compile, job, bytes, lambda: None)

    async def found(self, call: Callable[[], Any]) -> Any:
        """Return the program from a store; None if the lookup fails."""
        self.programs._first_stored = lambda names, control: call()  # type: ignore[method-assign]
        found = await asyncio.to_thread(self.programs._look_up, "cpu", ["a"])
        if self.programs._away_until:
            self.programs._away_until = 0.0
            raise RuntimeError(SAID)
        return found[0]

    async def kept(self, call: Callable[[], Any]) -> Any:
        """Wait until the writer thread has no programs left; raise what it could not write."""

        def put(upload: Any) -> None:
            call()

        self.programs._put = put  # type: ignore[method-assign]
        self.programs.last_problem = ""
        self.programs.put("cpu", "a", Entry({}, {}, b""))
        assert await asyncio.to_thread(self.programs.flush, 60)
        if self.programs.last_problem:
            raise RuntimeError(SAID)
        return "good"

    async def dispatched(self, call: Callable[[], Any], *, fetches: bool) -> Any:
        """Return or raise the device's result, on either of its threads."""
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        dispatch = (lambda: call) if fetches else (lambda: partial(_itself, call()))
        self.device.start(dispatch, lambda: None, found.set_result)
        result = await found
        if isinstance(result, BaseException):
            raise result
        return result

    async def in_plain(self, call: Callable[[], Any]) -> Any:
        """Run a callback whose exceptions are suppressed; the next one must run."""
        self.plain.submit(call)
        return await asyncio.to_thread(wait_for, self.plain, call)

    async def in_loop(self, call: Callable[[], Any]) -> Any:
        """Let a task of a model raise what stops its loop; the next one must run."""

        async def ends() -> None:
            raise KeyboardInterrupt if call is panicking else asyncio.CancelledError

        self.loop.start(ends)
        return await asyncio.to_thread(wait_for, self.loop, call)

    async def downloaded(self, call: Callable[[], Any]) -> Any:
        """Return the result of a thread that fetches model files."""
        cache = ModelCache(Path("unused"), 1, 1)
        try:
            return await asyncio.wrap_future(cache._begin(call))
        finally:
            cache.close()

    async def listed(self, call: Callable[[], Any]) -> Any:
        """Return when a store has listed an empty directory."""
        store = HttpStore("http://localhost", seconds=1, max_objects=1)
        store._page = lambda directory: call() and []  # type: ignore[method-assign]
        await asyncio.to_thread(store.objects)
        return "good"

    async def is_ready(self, call: Callable[[], Any]) -> Any:
        """Return whether a model is ready; it is unless the call raises."""
        asked = CodeReadiness("m", lambda: call() == "good").ask()
        if not await asyncio.wrap_future(asked):
            raise RuntimeError(SAID)
        return "good"

    async def looked(self, call: Callable[[], Any]) -> Any:
        """Return what a look at files finds; nothing if it fails."""
        seen = await self.reader(lambda: FilesSeen(call() == "good", 1))
        if seen is None:
            raise RuntimeError(SAID)
        return "good"


def _itself(value: Any) -> Any:
    return value


Work = Callable[[Threads, Callable[[], Any]], Awaitable[Any]]

WORK: Mapping[str, Work] = {
    "wait": lambda threads, call: threads.workers.wait(call),
    "fetch": lambda threads, call: asyncio.wrap_future(threads.workers.fetch(call)),
    "fetch_for": lambda threads, call: threads.workers.fetch_for(call),
    "load": lambda threads, call: threads.workers.load(call).within(60),
    "compile": lambda threads, call: threads.workers.compile(call).within(60),
    "finish": lambda threads, call: threads.workers.finish(call, Beat()).within(60),
    "host": lambda threads, call: threads.host.run(call),
    "dispatch": partial(Threads.dispatched, fetches=False),
    "device, fetched": partial(Threads.dispatched, fetches=True),
    "turns": lambda threads, call: asyncio.wrap_future(threads.turns.submit("a", call)),
    "wait_for": lambda threads, call: asyncio.to_thread(wait_for, threads.plain, call),
    "a call": Threads.in_plain,
    "a task of a loop": Threads.in_loop,
    "is_ready": Threads.is_ready,
    "a look at files": Threads.looked,
    "a compiler": Threads.compiled,
    "a program found": Threads.found,
    "a program kept": Threads.kept,
    "a download": Threads.downloaded,
    "a listing": Threads.listed,
}
RAW = ("wait_for", "a call", "a task of a loop", "a compiler")
"""Cases in which the original exception is passed on."""


@pytest.mark.parametrize("work", WORK)
async def test_a_thread_hands_over_exceptions_alone_and_goes_on(work: str) -> None:
    threads = Threads()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(Panic if work in RAW else Exception, match="library has given up"):
                await WORK[work](threads, panicking)
            again = await WORK[work](threads, good)
    finally:
        threads.close()

    assert "good" == again


async def test_a_load_hears_that_its_process_cannot_be_started(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the starting thread raises; the next load starts a process."""
    await place.grpc.unload_model("apart")
    start = "xlaserve.python_models.process.copies:RunningProcess"
    called = panics_once(start, place, monkeypatch)
    async with asyncio.timeout(60):
        failed = await told(place.grpc.load_model("apart"))
        again = await told(place.grpc.load_model("apart"))

    assert [start] == called
    assert "its process could not start: Panic" in failed
    assert "OK" == again


class Heard:
    """A channel to the parent that records messages."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self.said.put_nowait(message)


async def test_a_process_answers_its_parent(tmp_path: Path) -> None:
    """Questions and changes alike."""
    heard: Any = Heard()
    link = Link(heard, tmp_path)
    answers = iter((panicking, good))

    async def here(asked: Any) -> Any:
        return next(answers)()

    link.answer("how", here)
    link.handle(ChangeKind.LOAD, here)
    link.heard(Question(1, "how", None))
    link.heard(Question(2, "how", None))
    replies = [await heard.said.get() for _ in range(2)]
    answers = iter((panicking, good))
    for number in (3, 4):
        link.heard(Do(number, ChangeText(ChangeKind.LOAD, "m", {})))
    done = [await heard.said.get() for _ in range(2)]

    assert [(None, SAID), ("good", "")] == [(one.said, one.problem) for one in replies]
    assert [SAID, None] == [one.failure and one.failure.text for one in done]


async def test_a_front_end_goes_on_without_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_read", panicking)
    found = texts.Texts()
    wanted = texts.Wanted("m", 1, b"", "digest")
    await found.read([wanted])

    assert [] == found.missing([wanted])


OF_PROCESSES = {
    "a reply": test_a_process_answers_its_parent,
    "a change": test_a_process_answers_its_parent,
    "a process that starts": test_a_load_hears_that_its_process_cannot_be_started,
    "a text of a front end": test_a_front_end_goes_on_without_a_text,
}


# --- Callbacks of the event loop -----------------------------------------------------------------


async def test_what_copies_hand_back_does_not_wait_for_one_that_panics() -> None:
    outbox, handed = Outbox(asyncio.get_running_loop()), asyncio.Event()
    with outbox.gathered(), unheard():
        outbox.post(panicking)
        outbox.post(handed.set)
    with unheard():
        async with asyncio.timeout(60):
            await handed.wait()


async def test_a_round_goes_on_behind_a_connection_that_panics() -> None:
    looked, again = list[int](), asyncio.Event()

    def look(connection: int) -> None:
        if looked:
            again.set()
            return
        looked.append(connection)
        panicking()

    rounds = Rounds(lambda: [1, 2], look, seconds=lambda: 0.001)
    with unheard():
        rounds.begin()
        async with asyncio.timeout(60):
            await again.wait()
        rounds.stop()


async def test_a_request_is_told_that_no_batch_can_be_gathered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.server.gather("double", 4)
    place.server.application.registry.resolve("double")[1].station._batcher.in_a_row = 0  # type: ignore[attr-defined]
    called = panics_once(f"{BatchQueue.__module__}:BatchQueue.take", place, monkeypatch)
    async with asyncio.timeout(60):
        panicked, again = [await place.infer("double") for _ in range(2)]

    assert 1 == len(called)
    assert SAID in panicked or "internal error" in panicked
    assert "OK" == again


@own_engine_only
@pytest.mark.parametrize(("panics", "called"), [("take_output", "flush"), ("proceed", "_proceed")])
async def test_a_panic_in_a_turn_of_http2_ends_its_connection(
    panics: str, called: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients reconnect and are answered."""
    assert "OK" == await place.infer("double"), "before"
    connection: Any = next(iter(place.server.application.grpc._connections))
    with unheard(), monkeypatch.context() as changed:
        core = connection.core
        changed.setattr(core if panics == "take_output" else type(core), panics, panicking)
        asyncio.get_running_loop().call_soon(getattr(connection, called))
        await until(connection.transport.is_closing)
    async with asyncio.timeout(60):
        again = await place.infer("double")

    assert "OK" == again


async def test_a_panic_in_a_turn_of_http1_ends_its_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(numbers()).encode()
    asked = message("POST", "/v2/models/double/infer", body=body)
    called = panics_once("xlaserve.http.connection.ahead:Ahead.take", place, monkeypatch)
    with unheard():
        async with asyncio.timeout(60), connect(str(place.server.http)) as client:
            await client.send(asked * 3)
            await client.ended()
    async with connect(str(place.server.http)) as client:
        again = await client.ask(asked)

    assert 1 == len(called)
    assert 200 == again.status


@contextmanager
def unheard() -> Iterator[None]:
    """Keep the event loop from logging exceptions of callbacks."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)
    try:
        yield
    finally:
        loop.set_exception_handler(None)


OF_LOOPS = {
    "what copies hand back": test_what_copies_hand_back_does_not_wait_for_one_that_panics,
    "a round": test_a_round_goes_on_behind_a_connection_that_panics,
    "a batch": test_a_request_is_told_that_no_batch_can_be_gathered,
    "a turn of HTTP/2": test_a_panic_in_a_turn_of_http2_ends_its_connection,
    "a write of HTTP/2": test_a_panic_in_a_turn_of_http2_ends_its_connection,
    "a turn of HTTP/1.1": test_a_panic_in_a_turn_of_http1_ends_its_connection,
    "answers that are computed together": (
        "tests/core/serving/stations/test_together.py"
        "::test_an_answer_that_cannot_be_written_is_of_nobody_else"
    ),
}


async def test_every_call_of_the_event_loop_has_a_row() -> None:
    """A new callback must name its probes, or say why no caller waits."""
    tried = {*DOORS, *WORK, *OF_PROCESSES, *OF_LOOPS}
    probes = {probe for row in CALLED.values() if isinstance(row, tuple) for probe in row}

    assert set(callbacks()) == CALLED.keys()
    assert tried >= probes >= OF_LOOPS.keys()


async def test_every_place_has_a_row() -> None:
    """A new thread, task or future must name its probes, or say why no caller waits."""
    found = set(places())
    tried = {*DOORS, *WORK, *OF_PROCESSES}

    assert found == ANSWERED.keys() | NOT_ANSWERED.keys()
    assert not ANSWERED.keys() & NOT_ANSWERED.keys()
    assert tried == {probe for probes in ANSWERED.values() for probe in probes}


async def test_no_guard_of_a_place_lets_a_panic_pass() -> None:
    """An `except Exception` where a caller waits must be listed as harmless."""
    assert set(guards()) == UNGUARDED.keys()
