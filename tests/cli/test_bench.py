"""`xlaserve bench`, as a user runs it, against well-behaved and misbehaving servers."""

import asyncio
import json
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.server import Server
from support.process import ONLY_IDENTITY, command, run, served
from support.server import Serve
from typer.testing import CliRunner

from xlaserve.cli.bench.command import bench
from xlaserve.errors import XlaserveError
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve_proto import inference as pb

QUICK = ("--duration", "200ms", "--warmup", "0s")
METADATA = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]}
BIG = {"name": "big", "backend": "identity", "max_batch_size": 0}


def _invoke(arguments: tuple[str, ...]) -> tuple[int, str]:
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(bench)
    result = CliRunner().invoke(application, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


async def measure(*arguments: str) -> tuple[int, str]:
    """Run the command in a thread, because it has its own event loop."""
    return await asyncio.to_thread(_invoke, (*arguments, *QUICK))


async def measure_json(path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its exit status and its JSON result for each step."""
    code, _ = await measure(*arguments, "--json", str(path))
    return code, json.loads(path.read_text())["steps"]


def identity_of(datatype: str, dims: list[int], root: Path) -> Path:
    """Write a model that returns its only input; return the repository."""
    tensor = {"data_type": datatype, "dims": dims}
    config = BIG | {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]}
    (root / "models" / "big" / "1").mkdir(parents=True)
    (root / "models" / "big" / "config.json").write_text(json.dumps(config))
    return root / "models"


@asynccontextmanager
async def http_server(
    answer: Callable[[bytes], bytes | None],
) -> AsyncIterator[str]:
    """Serve HTTP/1.1 by hand; `answer` gets the request line, None closes the connection."""

    handlers: list[asyncio.Task[None] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        try:
            while head := await _request(reader):
                reply = answer(head)
                if reply is None:
                    break
                writer.write(reply)
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, handlers))


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return head.split(b"\r\n")[0]


def reply(status: str, body: bytes, *, chunked: bool = False) -> bytes:
    """Return a response, in one piece or in two chunks."""
    if not chunked:
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:half], body[half:], b""))
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks


# # --- a well-behaved server ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors",
    ["grpc", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("binary", "json"))],
)
async def test_a_served_model_is_measured(
    example_models: Path, serve: Serve, tmp_path: Path, tensors: str
) -> None:
    flags = () if tensors != "json" else ("--json-tensors",)
    async with serve(example_models, load_model=("mlp",), http_endpoint="port:0") as server:
        url = f"grpc://{server.url}" if tensors == "grpc" else f"http://{server.http}"
        code, steps = await measure_json(
            tmp_path / "out.json", "mlp", "--url", url, "--concurrency", "1,4", *flags
        )

    assert 0 == code
    assert [1, 4] == [step["concurrency"] for step in steps]
    for step in steps:
        assert step["answers"] > 0
        assert {} == step["errors"]
        latencies = [step["latency_ms"][name] for name in ("p50", "p90", "p95", "p99", "max")]
        assert sorted(latencies) == latencies
        assert step["answers"] == pytest.approx(step["answers_per_second"] * step["seconds"])


@pytest.mark.slow
async def test_the_command_prints_a_table_and_writes_both_files(
    example_models: Path, tmp_path: Path
) -> None:
    numbers, chart = tmp_path / "out.json", tmp_path / "out.svg"
    async with served(example_models, *ONLY_IDENTITY) as server:
        status, out, err = await run(
            *command("bench", "identity", "--url", f"grpc://{server.url}", "--batch", "3"),
            *QUICK,
            *("--concurrency", "2", "--json", str(numbers), "--svg", str(chart)),
        )

    assert (0, "") == (status, err)
    assert "identity, grpc: x FP32[3,16]" in out
    assert {"x": "FP32[3,16]"} == json.loads(numbers.read_text())["inputs"]
    assert "{http://www.w3.org/2000/svg}svg" == ET.fromstring(chart.read_text()).tag


@pytest.mark.slow
async def test_the_load_is_spread_as_it_was_asked(
    example_models: Path, serve: Serve, tmp_path: Path
) -> None:
    cases = {
        ("--concurrency", "8"): (1, 8),
        ("--concurrency", "8", "--streams", "4"): (2, 4),
        ("--concurrency", "8", "--connections", "4"): (4, 2),
        ("--connections", "2", "--streams", "3"): (2, 3),
    }
    found = {}
    async with serve(example_models, load_model=("identity",)) as server:
        for flags in cases:
            _, steps = await measure_json(
                tmp_path / "out.json", "identity", "--url", server.url, *flags
            )
            found[flags] = (steps[0]["connections"], steps[0]["streams"])

    assert cases == found


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_message_larger_than_every_window_is_measured(
    serve: Serve, tmp_path: Path, protocol: str
) -> None:
    """8 MB each way, two at a time: the server's windows are exhausted and widened again."""
    repository = identity_of("TYPE_FP32", [-1], tmp_path)
    shape = ("--shape", "x=2000000", "--concurrency", "2")
    async with serve(repository, load_model=("big",), http_endpoint="port:0") as server:
        url = f"grpc://{server.url}" if protocol == "grpc" else f"http://{server.http}"
        code, steps = await measure_json(tmp_path / "out.json", "big", "--url", url, *shape)

    assert (0, {}) == (code, steps[0]["errors"])
    assert steps[0]["answers"] >= 2


@pytest.mark.parametrize(
    "datatype", ["TYPE_STRING", "TYPE_BOOL", "TYPE_INT8", "TYPE_UINT64", "TYPE_BF16", "TYPE_FP16"]
)
async def test_elements_of_every_kind_are_made(serve: Serve, tmp_path: Path, datatype: str) -> None:
    repository = identity_of(datatype, [4], tmp_path)
    async with serve(repository, load_model=("big",), http_endpoint="port:0") as server:
        grpc, _ = await measure("big", "--url", server.url, "--concurrency", "1")
        rest, _ = await measure("big", "--url", f"http://{server.http}", "--concurrency", "1")

    assert (0, 0) == (grpc, rest)


async def test_a_unix_socket_is_measured(
    example_models: Path, serve: Serve, tmp_path: Path
) -> None:
    url = f"unix:{tmp_path / 'grpc.sock'}"
    async with serve(example_models, load_model=("identity",), grpc_endpoint=url):
        code, _ = await measure("identity", "--url", url, "--concurrency", "1")

    assert 0 == code


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--url", "127.0.0.1:1"), "127.0.0.1:1: cannot connect: Connection refused"),
        (("--url", "http://127.0.0.1:1"), "127.0.0.1:1: cannot connect: Connect"),
        (("--url", "https://127.0.0.1:1"), "127.0.0.1:1: cannot connect: Connect"),
        (("--url", "ftp://127.0.0.1:1"), "expected one of grpc://, grpcs://, http://, https://"),
        (("--url", "grpc://here"), "expected host:port or unix:path"),
        (("--url", "http://:1"), "expected http://host:port"),
        (("--tls-insecure",), "expected grpcs:// or https:// with options for TLS"),
        (("--json-tensors",), "over gRPC tensors travel raw"),
        (
            ("--duration", "5h"),
            "--duration: expected a duration such as 500ms or 5s, at most 10m, got '5h'",
        ),
        (("--duration", "0s"), "--duration: expected"),
        (("--concurrency", "1,x"), "--concurrency: expected numbers like 1,4,16, got '1,x'"),
        (("--concurrency", "5000"), "expected at most 4096 requests in flight, got 5000"),
        (("--concurrency", "5", "--connections", "2"), "5 cannot be spread evenly over 2"),
        (
            ("--concurrency", "1", "--connections", "1", "--streams", "1"),
            "--concurrency: leave it out: --connections times --streams is the number of requests"
            " in flight",
        ),
        (
            ("--url", "http://127.0.0.1:1", "--streams", "2"),
            "--streams, --connections: not available over REST, where every request in flight has"
            " its own connection",
        ),
        (("--shape", "x"), "--shape: expected NAME=1,16, got 'x'"),
    ],
)
async def test_a_mistake_is_said(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(XlaserveError) as caught:
        await asyncio.to_thread(_invoke, ("m", *arguments))

    assert text in str(caught.value)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_an_unknown_model_is_said(example_models: Path, serve: Serve, protocol: str) -> None:
    async with serve(example_models, http_endpoint="port:0") as server:
        url = server.url if protocol == "grpc" else f"http://{server.http}"
        with pytest.raises(XlaserveError, match="unknown model: 'nope'"):
            await measure("nope", "--url", url)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "input 'x' is FP32[-1,4,-1]: give its dynamic dimensions sizes with --shape"),
        (("--shape", "x=1,5,2"), "input 'x': expected FP32[-1,4,-1], got --shape 1,5,2"),
        (("--shape", "z=1"), "--shape: no input 'z', its inputs are 'x'"),
    ],
)
async def test_open_dimensions_are_asked_for(
    serve: Serve, tmp_path: Path, flags: tuple[str, ...], text: str
) -> None:
    repository = identity_of("TYPE_FP32", [-1, 4, -1], tmp_path)
    async with serve(repository, load_model=("big",)) as server:
        with pytest.raises(XlaserveError) as caught:
            await measure("big", "--url", server.url, *flags)

    assert text in str(caught.value)


async def test_more_streams_than_the_server_allows_are_refused(
    example_models: Path, serve: Serve
) -> None:
    async with serve(
        example_models, load_model=("identity",), max_streams_per_connection=4
    ) as server:
        with pytest.raises(XlaserveError, match="5 requests on one connection, but the server"):
            await measure("identity", "--url", server.url, "--concurrency", "5")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_the_wrong_protocol_is_said(example_models: Path, serve: Serve, scheme: str) -> None:
    async with serve(example_models, load_model=("identity",), http_endpoint="port:0") as server:
        address = server.http if scheme == "grpc" else server.url
        with pytest.raises(XlaserveError, match="connection broke|no HTTP server"):
            await measure("identity", "--url", f"{scheme}://{address}")


# # --- misbehaving servers -----------------------------------------------------------------------


async def test_errors_are_counted_by_status_and_are_no_answers(tmp_path: Path) -> None:
    """Every second inference after the first is refused."""
    inferences = 0

    def answer(line: bytes) -> bytes:
        nonlocal inferences
        if line.startswith(b"GET"):
            return reply("200 OK", json.dumps(METADATA).encode())
        inferences += 1
        return reply("200 OK" if inferences % 2 else "503 Service Unavailable", b"{}")

    async with http_server(answer) as url:
        code, steps = await measure_json(
            tmp_path / "out.json", "m", "--url", url, "--concurrency", "1"
        )

    assert 1 == code
    assert ["HTTP 503"] == list(steps[0]["errors"])
    assert inferences - 1 == steps[0]["answers"] + steps[0]["errors"]["HTTP 503"]
    assert steps[0]["answers"] in range(inferences // 2 - 1, inferences // 2 + 1)


async def test_an_answer_in_chunks_is_an_answer(tmp_path: Path) -> None:
    def answer(line: bytes) -> bytes:
        body = json.dumps(METADATA).encode() if line.startswith(b"GET") else b"x" * 1000
        return reply("200 OK", body, chunked=True)

    async with http_server(answer) as url:
        code, steps = await measure_json(
            tmp_path / "out.json", "m", "--url", url, "--concurrency", "2"
        )

    assert (0, {}) == (code, steps[0]["errors"])
    assert steps[0]["answers"] > 0


async def test_a_connection_that_is_closed_ends_the_step_as_an_error(tmp_path: Path) -> None:
    inferences = 0

    def answer(line: bytes) -> bytes | None:
        nonlocal inferences
        if line.startswith(b"GET"):
            return reply("200 OK", json.dumps(METADATA).encode())
        inferences += 1
        return reply("200 OK", b"{}") if inferences < 5 else None

    async with http_server(answer) as url:
        code, steps = await measure_json(
            tmp_path / "out.json", "m", "--url", url, "--concurrency", "1"
        )

    assert (1, 3) == (code, steps[0]["answers"])
    assert {"connection closed": 1} == steps[0]["errors"]


async def test_a_refusal_of_the_first_request_ends_it_all() -> None:
    def answer(line: bytes) -> bytes:
        if line.startswith(b"GET"):
            return reply("200 OK", json.dumps(METADATA).encode())
        return reply("400 Bad Request", b'{"error":"not like this"}')

    async with http_server(answer) as url:
        with pytest.raises(XlaserveError, match='HTTP 400: {"error":"not like this"}'):
            await measure("m", "--url", url)


async def test_metadata_that_is_none_is_said() -> None:
    async with http_server(lambda line: reply("200 OK", b"hello")) as url:
        with pytest.raises(XlaserveError, match="expected V2 metadata, got hello"):
            await measure("m", "--url", url)


async def test_what_is_never_answered_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    inferences = 0

    def answer(line: bytes) -> bytes:
        nonlocal inferences
        if line.startswith(b"GET"):
            return reply("200 OK", json.dumps(METADATA).encode())
        inferences += 1
        return reply("200 OK", b"{}") if inferences == 1 else b""

    async with http_server(answer) as url:
        flags = ("--concurrency", "3", "--timeout", "0.3")
        code, steps = await measure_json(tmp_path / "out.json", "m", "--url", url, *flags)

    assert (1, 0) == (code, steps[0]["answers"])
    assert {"no answer in time": 3} == steps[0]["errors"]


class EveryOther(pb.GrpcInferenceServiceBase):
    """Answers one inference and refuses the next."""

    def __init__(self) -> None:
        self.inferences = 0

    async def model_metadata(
        self, model_metadata_request: pb.ModelMetadataRequest
    ) -> pb.ModelMetadataResponse:
        tensor = pb.ModelMetadataResponseTensorMetadata(name="x", datatype="FP32", shape=[2])
        return pb.ModelMetadataResponse(name="m", inputs=[tensor])

    async def model_infer(self, model_infer_request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        self.inferences += 1
        if not self.inferences % 2:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "every other one")
        return pb.ModelInferResponse(model_name="m")


async def test_the_grpc_status_of_a_refusal_is_counted(tmp_path: Path) -> None:
    service, path = EveryOther(), tmp_path / "grpc.sock"
    server = Server([service], codec=WireCodec())
    await server.start(path=str(path))
    try:
        code, steps = await measure_json(
            tmp_path / "out.json", "m", "--url", f"unix:{path}", "--concurrency", "1"
        )
    finally:
        server.close()
        await server.wait_closed()

    assert 1 == code
    assert ["RESOURCE_EXHAUSTED"] == list(steps[0]["errors"])
    assert service.inferences - 1 == steps[0]["answers"] + sum(steps[0]["errors"].values())
    assert abs(steps[0]["answers"] - service.inferences // 2) <= 1
