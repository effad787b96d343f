"""curl, nghttp and h2load: HTTP/2 clients without gRPC support."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from support import identity_models
from support.process import run
from support.server import RunningServer, Serve
from support.tls import write_certificate
from support.tools import missing, program
from support.wire import framed

from xlaserve_proto import inference as pb

LIVE = "/inference.GRPCInferenceService/ServerLive"
HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
REQUESTS = 2000
PICTURE_BYTES = 224 * 224 * 3 * 4


@pytest.fixture
def message(tmp_path: Path) -> str:
    file = tmp_path / "message"
    file.write_bytes(framed(b""))
    return str(file)


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with serve(tmp_path) as running:
        yield running


async def test_curl_gets_the_trailers(server: RunningServer, message: str, tmp_path: Path) -> None:
    curl, answer = program("curl"), tmp_path / "answer"
    _, features, _ = await run(curl, "--version")
    if "HTTP2" not in features:
        missing("curl is built without HTTP/2")
    arguments = ("--http2-prior-knowledge", "--silent", "--show-error", *HEADERS)
    data = ("--data-binary", f"@{message}", "--dump-header", "-", "--output", str(answer))
    status, out, err = await run(curl, *arguments, *data, f"http://{server.url}{LIVE}")

    assert 0 == status, err
    assert out.startswith("HTTP/2 200")
    assert "grpc-status: 0" in out
    assert framed(b"\x08\x01") == answer.read_bytes()


async def test_nghttp_gets_the_trailers(server: RunningServer, message: str) -> None:
    arguments = ("--verbose", "--null-out", "-d", message, *HEADERS)
    status, out, err = await run(program("nghttp"), *arguments, f"http://{server.url}{LIVE}")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)

    assert 0 == status, err
    assert "grpc-status: 0" in plain
    assert "GOAWAY" not in plain.split("grpc-status")[0]


async def test_h2load_is_served_to_the_last_request(server: RunningServer, message: str) -> None:
    """More requests are sent concurrently than a connection may have open."""
    load = ("-n", str(REQUESTS), "-c", "4", "-m", "400", "-d", message, *HEADERS)
    status, out, err = await run(program("h2load"), *load, f"http://{server.url}{LIVE}")

    assert 0 == status, err
    assert f"{REQUESTS} succeeded, 0 failed, 0 errored, 0 timeout" in out


async def test_h2load_is_served_over_tls(serve: Serve, tmp_path: Path) -> None:
    """Long concurrent messages: their frames and TLS records have different boundaries."""
    models, picture = tmp_path / "models", tmp_path / "picture"
    identity_models.write(models, "echo", "UINT8")
    tensor = pb.ModelInferRequestInferInputTensor(name="x", datatype="UINT8", shape=[PICTURE_BYTES])
    request = pb.ModelInferRequest(
        "echo", inputs=[tensor], raw_input_contents=[bytes(PICTURE_BYTES)]
    )
    picture.write_bytes(framed(bytes(request)))
    load = ("-n", "80", "-c", "1", "-m", "8", "-d", str(picture), *HEADERS)
    certificate = write_certificate(trustme.CA(), tmp_path)
    async with serve(models, load_model=("echo",), **certificate) as server:
        url = f"https://{server.url}/inference.GRPCInferenceService/ModelInfer"
        status, out, err = await run(program("h2load"), *load, url)

    assert 0 == status, err
    assert "80 succeeded, 0 failed, 0 errored, 0 timeout" in out
