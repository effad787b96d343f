"""Kinds of clients that send valid requests and verify the answers."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import asyncio
import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import identity_models, kinds, python_models, sequence_models, tiny_chat
from tritonclient.grpc import service_pb2 as pb

from acceptance.asking import SECONDS, floats, infer_message
from acceptance.books import Fate
from acceptance.crowd import Kind, Place
from acceptance.subjects import PLUS, WIDTH, export_plus

_LARGE = 1 << 18
"""FP32 elements in one mebibyte."""
ORIGIN = "http://page.example"
"""Origin that the server accepts (CORS)."""
_WEB = {
    "Content-Type": "application/grpc-web+proto",
    "X-Grpc-Web": "1",
    "Origin": ORIGIN,
}
IMPORTED = (
    *("exported", "sums", "eigvalsh", "language", "sequence", "counter"),
    *("embedding", "encoder", "adopted", "onnx", "served_onnx", "pt2", "served_pt2", "python"),
)
"""The models of `support.kinds` that are served."""


def echoes(*names: str, datatype: str = "FP32") -> Callable[[Path], None]:
    """Return a writer of models that echo their inputs."""

    def write(root: Path) -> None:
        for name in names:
            identity_models.write(root, name, datatype)

    return write


def programs(*names: str) -> Callable[[Path], None]:
    """Return a writer of models, XLA programs that add a number."""

    def write(root: Path) -> None:
        for name in names:
            export_plus(root, name, PLUS)

    return write


def some(random: Random) -> "np.ndarray[Any, Any]":
    """Return random numbers."""
    return np.array([random.random() for _ in range(random.randint(1, WIDTH))], np.float32)


def json_of(values: "list[Any]", datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    """Return the JSON of an inference request with one tensor."""
    tensor = {"name": "x", "datatype": datatype, "shape": [len(values)], "data": values}
    return {"inputs": [tensor], **more}


def first_of(text: str) -> Any:
    """Return the data of the first output of a JSON answer."""
    return json.loads(text)["outputs"][0]["data"]


# --- Sequential requests -----------------------------------------------------------------------


async def _grpc(place: Place, random: Random) -> None:
    sent = some(random)
    found = await place.infer("grpc.echo", sent)
    place.books.expect(np.array_equal(found, sent), f"echo of {sent} was {found}")
    rows = np.full((random.randint(1, 4), WIDTH), random.randrange(1000), np.float32)
    found = await place.infer("grpc.plus", rows)
    place.books.expect(np.array_equal(found, rows.ravel() + PLUS), f"{rows} + 1 was {found}")


async def _rest(place: Place, random: Random) -> None:
    sent = [random.randrange(1000) for _ in range(WIDTH)]
    path = "/v2/models/rest.echo/infer"
    found = first_of(await place.post(path, json_of(sent), "rest.echo"))
    place.books.expect(found == sent, f"echo of {sent} was {found}")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [sent]}
    path = "/v2/models/rest.plus/infer"
    found = first_of(await place.post(path, {"inputs": [tensor]}, "rest.plus"))
    place.books.expect(found == [one + PLUS for one in sent], f"{sent} + 1 was {found}")


async def _texts(place: Place, random: Random) -> None:
    sent = ["ä" * random.randint(0, 20) for _ in range(random.randint(1, 5))]
    path = "/v2/models/texts.echo/infer"
    found = first_of(await place.post(path, json_of(sent, "BYTES"), "texts.echo"))
    place.books.expect(found == sent, f"texts of {sent} were {found}")


async def _binary(place: Place, random: Random) -> None:
    """Send and receive binary tensors, occasionally of one mebibyte."""
    count = _LARGE if not random.randrange(20) else random.randint(1, WIDTH)
    sent = np.full(count, random.random(), np.float32)
    size = {"binary_data_size": sent.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": [count], "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    name = "Inference-Header-Content-Length"
    path, headers = "/v2/models/binary.echo/infer", {name: str(len(head))}
    body = head + sent.tobytes()
    async with place.session.post(path, data=io.BytesIO(body), headers=headers) as answer:
        octets = await answer.read()
        if answer.status != 200:
            raise LookupError(f"binary: {answer.status} {octets[:200]!r}")
        found = octets[int(answer.headers[name]) :]
    place.books.note("binary.echo", Fate.ANSWERED)
    place.books.expect(found == sent.tobytes(), f"{count} numbers in octets were others")


async def _compressed(place: Place, random: Random) -> None:
    sent = [float(random.randrange(9))] * 2000
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    body = gzip.compress(json.dumps(json_of(sent)).encode(), 1)
    path = "/v2/models/compressed.echo/infer"
    found = first_of(await place.post(path, body, "compressed.echo", headers=headers))
    place.books.expect(found == sent, "a compressed answer was another")
    asked = infer_message("compressed.echo", np.array(sent, np.float32))
    how = grpc.Compression.Gzip
    answer = await place.stub.ModelInfer(asked, timeout=SECONDS, compression=how)
    place.books.note("compressed.echo", Fate.ANSWERED)
    found = floats(answer.raw_output_contents[0]).tolist()
    place.books.expect(found == sent, "a compressed message was another")


async def _connections(place: Place, random: Random) -> None:
    """Open a new connection for each request."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    sent = some(random)
    async with grpc.aio.insecure_channel(place.subject.grpc, options=options) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer = await infer(infer_message("connections.echo", sent), timeout=SECONDS)
    place.books.note("connections.echo", Fate.ANSWERED)
    found = floats(answer.raw_output_contents[0])
    place.books.expect(np.array_equal(found, sent), f"echo of {sent} was {found}")
    path, headers = "/v2/models/connections.echo/infer", {"Connection": "close"}
    values = sent.tolist()
    text = await place.post(path, json_of(values), "connections.echo", headers=headers)
    place.books.expect(np.allclose(first_of(text), values), f"echo of {values} was {text}")


async def _web(place: Place, random: Random) -> None:
    sent = some(random)
    message = infer_message("web.echo", sent).SerializeToString()
    path = "/inference.GRPCInferenceService/ModelInfer"
    body = b"\0" + len(message).to_bytes(4, "big") + message
    async with place.session.post(path, data=body, headers=_WEB) as answer:
        octets = await answer.read()
    if answer.status != 200 or not octets or octets[0]:
        raise LookupError(f"gRPC-Web: {answer.status} {octets[:200]!r}")
    size = int.from_bytes(octets[1:5], "big")
    place.books.note("web.echo", Fate.ANSWERED)
    found = floats(pb.ModelInferResponse.FromString(octets[5 : 5 + size]).raw_output_contents[0])
    place.books.expect(np.array_equal(found, sent), f"echo of {sent} was {found}")


@contextmanager
def _region(name: str, octets: bytes) -> Iterator[None]:
    path = Path("/dev/shm", name)
    path.write_bytes(octets)
    try:
        yield
    finally:
        path.unlink()


async def _regions(place: Place, random: Random) -> None:
    """Register shared memory, name it in a request, and unregister it."""
    sent, name = some(random), f"soak-{random.randrange(1 << 40):x}"
    with _region(name, sent.tobytes()):
        request = pb.SystemSharedMemoryRegisterRequest(
            name=name, key=f"/{name}", byte_size=sent.nbytes
        )
        await place.stub.SystemSharedMemoryRegister(request, timeout=SECONDS)
        asked = pb.ModelInferRequest(model_name="regions.echo")
        tensor = asked.inputs.add(name="x", datatype="FP32", shape=sent.shape)
        tensor.parameters["shared_memory_region"].string_param = name
        tensor.parameters["shared_memory_byte_size"].int64_param = sent.nbytes
        answer = await place.stub.ModelInfer(asked, timeout=SECONDS)
        place.books.note("regions.echo", Fate.ANSWERED)
        found = floats(answer.raw_output_contents[0])
        place.books.expect(np.array_equal(found, sent), f"a region of {sent} was {found}")
        gone = pb.SystemSharedMemoryUnregisterRequest(name=name)
        await place.stub.SystemSharedMemoryUnregister(gone, timeout=SECONDS)


# --- Related requests --------------------------------------------------------------------------


async def _streams(place: Place, random: Random) -> None:
    """Send requests on one stream, each waiting for its predecessor; answers must be in order."""
    count = random.randint(1, 10)
    stream = place.stub.ModelStreamInfer(timeout=SECONDS)
    for _ in range(count):
        sent = some(random)
        await stream.write(infer_message("streams.echo", sent))
        answer = await stream.read()
        if answer is grpc.aio.EOF or answer.error_message:
            raise LookupError(f"a stream ended: {answer}")
        place.books.note("streams.echo", Fate.ANSWERED)
        found = floats(answer.infer_response.raw_output_contents[0])
        place.books.expect(np.array_equal(found, sent), f"echo of {sent} was {found}")
    await stream.done_writing()
    end = await stream.read()
    place.books.expect(end is grpc.aio.EOF, "a stream that was done went on")


def _write_sequences(root: Path) -> None:
    sequence_models.export_fold(root, "sequences.fold")
    sequence_models.configure(root, "sequences.fold")


async def _sequences(place: Place, random: Random) -> None:
    sequence = random.randrange(1, 1 << 60)
    values = [random.randrange(100) for _ in range(random.randint(1, 8))]
    for at, value in enumerate(values):
        request = pb.ModelInferRequest(model_name="sequences.fold")
        request.raw_input_contents.append(np.array([[value]], np.int32).tobytes())
        request.inputs.add(name="x", datatype="INT32", shape=[1, 1])
        request.parameters["sequence_id"].int64_param = sequence
        request.parameters["sequence_start"].bool_param = at == 0
        request.parameters["sequence_end"].bool_param = at == len(values) - 1
        answer = await place.stub.ModelInfer(request, timeout=SECONDS)
        place.books.note("sequences.fold", Fate.ANSWERED)
        names = [output.name for output in answer.outputs]
        found = int(np.frombuffer(answer.raw_output_contents[names.index("y")], np.int64)[0])
        right = sequence_models.folded(values[: at + 1])
        place.books.expect(found == right, f"the sequence {values[: at + 1]} was {found}")


_COUNTING = """
class Model(PythonModel):
    inputs = {"x": ("BYTES", [1])}
    outputs = {"y": ("INT32", [1])}
    max_batch_size = 16
    batched = True

    def infer(self, inputs):
        if any(not text for text in inputs["x"][:, 0]):
            raise InferenceError("an empty text")
        return {"y": np.array([[len(text)] for text in inputs["x"][:, 0]], np.int32)}
"""


def _write_python(root: Path) -> None:
    python_models.write(root, "python.sizes", _COUNTING)


async def _python(place: Place, random: Random) -> None:
    """Have rows batched with those of other clients, some of which the model refuses."""
    text = "" if not random.randrange(4) else "x" * random.randint(1, 50)
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    path = "/v2/models/python.sizes/infer"
    if text:
        found = first_of(await place.post(path, {"inputs": [tensor]}, "python.sizes"))
        place.books.expect(found == [len(text)], f"the size of {len(text)} was {found}")
        return
    async with place.session.post(path, json={"inputs": [tensor]}) as answer:
        told = await answer.text()
    place.books.note("python.sizes", Fate.FAILED)
    place.books.expect(answer.status == 400 and "an empty text" in told, f"an empty one: {told}")


def _write_ensemble(root: Path) -> None:
    export_plus(root, "ensemble.step", PLUS)
    (root / "ensemble.both" / "1").mkdir(parents=True)
    tensor = {"data_type": "TYPE_FP32", "dims": [WIDTH]}
    step = {"model_name": "ensemble.step", "model_version": -1}
    twice = [
        {**step, "input_map": {"x": "x"}, "output_map": {"y": "once"}},
        {**step, "input_map": {"x": "once"}, "output_map": {"y": "y"}},
    ]
    said = {
        "platform": "ensemble",
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {"step": twice},
    }
    (root / "ensemble.both" / "config.json").write_text(json.dumps(said))


async def _ensemble(place: Place, random: Random) -> None:
    rows = np.full((random.randint(1, 4), WIDTH), random.randrange(1000), np.float32)
    found = await place.infer("ensemble.both", rows)
    place.books.note("ensemble.step", Fate.ANSWERED, 2)
    place.books.expect(np.array_equal(found, rows.ravel() + 2 * PLUS), f"{rows} + 2 was {found}")


def _write_chat(root: Path) -> None:
    tiny_chat.export(root / "chat.model", max_length=32, slots="1")


async def _chat(place: Place, random: Random) -> None:
    """Request chat completions, whole and streamed; the same messages must get the same answer."""
    said = random.choice(("hi", "what", "tell me", "abc"))
    body = {
        "model": "chat.model",
        "messages": [{"role": "user", "content": said.replace(" ", "")}],
        "max_tokens": 6,
        "temperature": 0,
    }
    path = "/v1/chat/completions"
    if random.randrange(2):
        answer = json.loads(await place.post(path, body, "chat.model"))
        text = answer["choices"][0]["message"]["content"]
    else:
        events = await place.post(path, {**body, "stream": True}, "chat.model")
        lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
        place.books.expect(lines[-1:] == ["[DONE]"], f"the end of a stream was {lines[-1:]}")
        deltas = [json.loads(line)["choices"] for line in lines[:-1]]
        text = "".join(one[0]["delta"].get("content") or "" for one in deltas if one)
    place.books.same(f"the answer to {said}", text)


async def _imported(place: Place, random: Random) -> None:
    """Request models of every kind that an exporter or importer writes."""
    name = random.choice(IMPORTED)
    path, body = kinds.request(name)
    place.books.same(name, kinds.numbers(await place.post(path, body, name)))


def _write_imported(root: Path) -> None:
    kinds.write(root, iter(IMPORTED))


# --- Monitoring clients ------------------------------------------------------------------------


async def _watchers(place: Place, random: Random) -> None:
    """Request everything that reports on the server, and keep a health watch open."""
    for path in ("/v2", "/v2/health/ready", "/metrics", "/v2/models/stats"):
        async with place.session.get(path) as answer:
            await answer.read()
            place.books.expect(answer.status == 200, f"{path} was {answer.status}")
    request = pb.RepositoryIndexRequest()
    await place.stub.RepositoryIndex(request, timeout=SECONDS)
    watch = health_pb2_grpc.HealthStub(place.channel).Watch
    stream = watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    answer = await stream.read()
    serving = health_pb2.HealthCheckResponse.SERVING
    place.books.expect(getattr(answer, "status", None) == serving, f"health was {answer}")
    stream.cancel()


async def _pipelined(place: Place, random: Random) -> None:
    """Pipeline several requests on each connection."""

    async def one() -> None:
        sent = some(random)
        found = await place.infer("pipelined.plus", np.resize(sent, (1, WIDTH)))
        right = np.resize(sent, WIDTH) + np.float32(PLUS)
        place.books.expect(np.array_equal(found, right), f"{sent} + 1 was {found}")

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(one())


def both(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a writer that calls several writers."""

    def write(root: Path) -> None:
        for one in writers:
            one(root)

    return write


KINDS = (
    Kind(
        "grpc",
        _grpc,
        ("grpc.echo", "grpc.plus"),
        both(echoes("grpc.echo"), programs("grpc.plus")),
        clients=2,
    ),
    Kind("pipelined", _pipelined, ("pipelined.plus",), programs("pipelined.plus")),
    Kind(
        "rest",
        _rest,
        ("rest.echo", "rest.plus"),
        both(echoes("rest.echo"), programs("rest.plus")),
        clients=2,
    ),
    Kind("texts", _texts, ("texts.echo",), echoes("texts.echo", datatype="BYTES")),
    Kind("binary", _binary, ("binary.echo",), echoes("binary.echo")),
    Kind("compressed", _compressed, ("compressed.echo",), echoes("compressed.echo")),
    Kind("connections", _connections, ("connections.echo",), echoes("connections.echo")),
    Kind("web", _web, ("web.echo",), echoes("web.echo")),
    Kind("regions", _regions, ("regions.echo",), echoes("regions.echo")),
    Kind("streams", _streams, ("streams.echo",), echoes("streams.echo"), clients=2),
    Kind("sequences", _sequences, ("sequences.fold",), _write_sequences, clients=3),
    Kind("python", _python, ("python.sizes",), _write_python, clients=6),
    Kind("ensemble", _ensemble, ("ensemble.both", "ensemble.step"), _write_ensemble),
    Kind("chat", _chat, ("chat.model",), _write_chat, clients=2),
    Kind("imported", _imported, IMPORTED, _write_imported),
    Kind("watchers", _watchers, pause_seconds=0.5),
)
"""Kinds of clients. Model names begin with the kind's name, except those of `imported`."""
