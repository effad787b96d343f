"""`xlaserve bench --generate`, as a user runs it, against slow or misbehaving servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.server import Server
from support import tiny_language
from support.server import Serve
from typer.testing import CliRunner

from xlaserve.cli.bench.command import bench
from xlaserve.errors import XlaserveError
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve_proto import inference as pb

QUICK = ("--generate", "--duration", "200ms", "--warmup", "0s", "--rate", "50")
TOKENS = pb.ModelMetadataResponseTensorMetadata(name="tokens", datatype="INT32", shape=[-1])


class Generator(pb.GrpcInferenceServiceBase):
    """Streams the requested number of tokens; some requests get a different treatment."""

    def __init__(self, **otherwise: Any) -> None:
        self.asked: list[tuple[int, int]] = []
        """Token counts of the prompt and of the answer."""
        self.prompts: list[bytes] = []
        self._otherwise = otherwise

    async def model_metadata(
        self, model_metadata_request: pb.ModelMetadataRequest
    ) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(name="m", inputs=[self._otherwise.get("metadata", TOKENS)])

    async def model_stream_infer(
        self, model_infer_request_iterator: AsyncIterator[pb.ModelInferRequest]
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in model_infer_request_iterator:
            count = request.parameters["max_tokens"].int64_param
            assert request.parameters["ignore_eos"].bool_param
            (prompt,) = request.raw_input_contents
            self.asked.append((len(prompt) // 4, count))
            self.prompts.append(prompt)
            number = len(self.asked) - 2  # after the probe
            if number == self._otherwise.get("refused"):
                raise GRPCError(Status.RESOURCE_EXHAUSTED, "the queue is full")
            if number == self._otherwise.get("silent"):
                await asyncio.Event().wait()
            for index in range(count):
                if index and number == self._otherwise.get("fails"):
                    yield pb.ModelStreamInferResponse(error_message="it broke")
                yield token(final=index == count - 1)


def token(*, final: bool) -> pb.ModelStreamInferResponse:
    answer = pb.ModelInferResponse(
        model_name="m",
        parameters={"triton_final_response": pb.InferParameter(bool_param=final)},
        outputs=[pb.ModelInferResponseInferOutputTensor("token", "INT32", [1])],
        raw_output_contents=[np.int32(7).tobytes()],
    )
    return pb.ModelStreamInferResponse(infer_response=answer)


@asynccontextmanager
async def serving(service: Generator, tmp_path: Path) -> AsyncIterator[str]:
    server = Server([service], codec=WireCodec())
    await server.start(path=str(tmp_path / "grpc.sock"))
    try:
        yield f"unix:{tmp_path / 'grpc.sock'}"
    finally:
        server.close()
        await server.wait_closed()


def _invoke(arguments: tuple[str, ...]) -> tuple[int, str]:
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(bench)
    result = CliRunner().invoke(application, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


async def measure(*arguments: str) -> tuple[int, str]:
    """Run the command in a thread, because it has its own event loop."""
    return await asyncio.to_thread(_invoke, ("m", *QUICK, *arguments))


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """A file of three pairs."""
    file = tmp_path / "lengths.jsonl"
    pairs = [{"prompt": prompt, "answer": 2 * prompt} for prompt in (3, 9, 4)]
    file.write_text("\n".join(map(json.dumps, pairs)))
    return str(file)


async def test_requests_have_the_lengths_of_the_file_in_turn(tmp_path: Path, lengths: str) -> None:
    """A first request tries the longest prompt with one token; no two prompts are equal."""
    service, numbers = Generator(), tmp_path / "out.json"
    async with serving(service, tmp_path) as url:
        flags = ("--lengths", lengths, "--connections", "3", "--json", str(numbers))
        code, text = await measure("--url", url, *flags)
    found = json.loads(numbers.read_text())
    count = found["requests"]

    assert 0 == code
    assert 5 < count == len(service.asked) - 1
    assert (9, 1) == service.asked[0]
    # Over several connections they arrive in any order.
    assert sorted(([(3, 6), (9, 18), (4, 8)] * count)[:count]) == sorted(service.asked[1:])
    assert count + 1 == len(set(service.prompts))
    assert sum(answer for _, answer in service.asked[1:]) == found["tokens"]
    assert sum(prompt for prompt, _ in service.asked[1:]) == found["prompt_tokens"]
    assert (count, 0, 0, {}) == tuple(found[key] for key in ("answered", "late", "short", "errors"))
    assert f"{count} requests, on average {found['prompt_tokens'] / count:.0f} tokens" in text
    assert f"{count} answered, 0 late, 0 failed" in text


async def test_what_fails_is_counted_by_its_error_and_ends_with_1(
    tmp_path: Path, lengths: str
) -> None:
    service, numbers = Generator(refused=0, fails=1), tmp_path / "out.json"
    async with serving(service, tmp_path) as url:
        code, text = await measure("--url", url, "--lengths", lengths, "--json", str(numbers))
    found = json.loads(numbers.read_text())
    refused, broken = f"{url}: RESOURCE_EXHAUSTED: the queue is full", f"{url}: it broke"

    assert (1, found["requests"] - 2) == (code, found["answered"])
    assert {refused: 1, broken: 1} == found["errors"]
    assert "0 late, 2 failed" in text
    assert f"1 x {refused}\n" in text


async def test_what_is_never_answered_is_late_and_ends_with_1(tmp_path: Path, lengths: str) -> None:
    """On a busy machine others are late too, so the test asserts no number."""
    service, numbers = Generator(silent=2), tmp_path / "out.json"
    async with serving(service, tmp_path) as url:
        flags = ("--lengths", lengths, "--timeout", "0.5", "--json", str(numbers))
        code, text = await measure("--url", url, *flags)
    found = json.loads(numbers.read_text())

    assert 1 == code
    assert 1 <= found["late"] == found["requests"] - found["answered"]
    assert found["first_token_ms"]["max"] >= 500
    assert (
        f"late: {found['late']} requests were unfinished when the measurement ended; their"
        " latencies are lower bounds" in text
    )


async def test_a_tensor_that_is_missing_is_said(tmp_path: Path) -> None:
    image = pb.ModelMetadataResponseTensorMetadata(name="image", datatype="FP32", shape=[2])
    async with serving(Generator(metadata=image), tmp_path) as url:
        with pytest.raises(XlaserveError, match=r"an input 'tokens' INT32\[-1\], got 'image' FP32"):
            await measure("--url", url)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--generate", "--concurrency", "4"), "--concurrency: no effect with --generate"),
        (
            ("--generate", "--shape", "x=1", "--svg", "x.svg"),
            "--shape, --svg: no effect with --generate",
        ),
        (("--rate", "2", "--seed", "1"), "--rate, --seed: no effect without --generate"),
        (
            ("--generate", "--lengths", "x", "--longest", "9"),
            "--longest: leave it out with --lengths, it limits lengths drawn at random",
        ),
        (("--generate", "--lengths", "nowhere"), "'nowhere' cannot be read: No such file"),
        (("--generate", "--rate", "0"), "--rate: expected more than 0 and at most 10000, got 0"),
        (
            ("--generate", "--rate", "nan"),
            "--rate: expected more than 0 and at most 10000, got nan",
        ),
        (("--generate", "--connections", "999"), "--connections: expected at most 256, got 999"),
        (("--generate", "--url", "http://127.0.0.1:1"), "--generate needs gRPC, as host:port"),
        (("--generate", "--url", "127.0.0.1:1"), "cannot connect: Connection refused"),
    ],
)
async def test_a_mistake_is_said(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(XlaserveError) as caught:
        await asyncio.to_thread(_invoke, ("m", *arguments))

    assert text in str(caught.value)


@pytest.mark.slow  # it compiles a model
async def test_a_served_generator_is_measured(serve: Serve, tmp_path: Path) -> None:
    """A setting beyond its vocabulary or its positions is an error before the measurement."""
    tiny_language.export(tmp_path / "models" / "m" / "1")
    numbers = tmp_path / "out.json"
    async with serve(tmp_path / "models", load_model=("m",)) as server:
        flags = ("--url", server.url, "--longest", "64")
        code, _ = await measure(*flags, "--vocab", "32", "--json", str(numbers))
        with pytest.raises(XlaserveError, match="token ids of 0 to 31.*\n.*--vocab"):
            await measure(*flags)
        with pytest.raises(XlaserveError, match="expected 1 to 64 tokens.*\n.*--longest"):
            await measure("--url", server.url, "--vocab", "32")
    found = json.loads(numbers.read_text())

    assert (0, 0, {}) == (code, found["short"], found["errors"])
    assert found["requests"] == found["answered"] > 0
