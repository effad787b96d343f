"""However many clients make the server hold memory, it stays within its budget.

It keeps serving others, and releases the memory when the clients leave. Measured as the resident
size of a server process; the figures are printed.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from support import frames, hoarders
from support.engines import own_engine_only
from support.hoarders import MIB, WIDE, Hoarder, Watched, hoarding, http_request, push, watched
from support.tls import trusting, write_certificate
from support.victim import infer_request

pytestmark = pytest.mark.large

BACK_PART = 0.05
"""Permitted growth afterwards, as a fraction of the idle size."""
BACK_SECONDS = 10.0
BODY_BYTES = 60 * MIB
_SMALL = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1] * 16}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    hoarders.export_models(folder / "models")
    return folder


def infer(server: Watched) -> int:
    """Send a small inference on a new connection; return its status."""
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/echo/infer", json.dumps(_SMALL).encode()
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return int(answer.status)


@contextmanager
def budget(
    capsys: pytest.CaptureFixture[str], server: Watched, name: str, most: int
) -> Iterator[None]:
    """Print the server's growth during a block; require it to shrink again afterwards."""
    for _ in range(3):
        infer(server)
    time.sleep(1)
    idle = server.resident_bytes()
    server.forget_peak()
    yield
    growth = server.peak_bytes() - idle
    back = idle + int(BACK_PART * idle)
    seconds = server.seconds_until(back, BACK_SECONDS)
    left = server.resident_bytes() - idle
    with capsys.disabled():
        print(
            f"\n{name}: idle {idle / MIB:.0f} MiB, peak +{growth / MIB:.0f} MiB (criterion: below "
            f"+{most / MIB:.0f}), {seconds:.1f} s behind it {left / MIB:+.0f} MiB (criterion: "
            f"{BACK_PART * idle / MIB:+.0f} in {BACK_SECONDS:g} s)"
        )

    assert growth < most
    assert seconds < BACK_SECONDS
    assert 200 == infer(server)


def test_bodies_that_do_not_end(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 connections, each with an incomplete body of 60 MB, under a limit of 256 MB."""
    body = bytes(BODY_BYTES)
    head = http_request("vector", BODY_BYTES + 1, "Inference-Header-Content-Length: 0")
    with watched(models, max_held_bytes=256 * MIB) as server:
        with budget(capsys, server, "40 bodies of 60 MiB over REST", 320 * MIB):
            with hoarding(lambda: Hoarder(server.http, head, body), 40) as clients:
                push(clients, 20)
                assert 200 == infer(server)


def test_answers_that_nobody_reads(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 answers of 10 MB under a limit of 64 MB."""
    request = http_request("wide", len(WIDE)) + WIDE
    with watched(models, max_held_bytes=64 * MIB) as server:
        with budget(capsys, server, "100 answers of 10 MiB over REST", 128 * MIB):
            with hoarding(lambda: Hoarder(server.http, request), 100) as clients:
                push(clients)
                time.sleep(3)
                assert 200 == infer(server)
                refused = sum(b" 503 " in client.first() for client in clients)
    assert refused > 80


@own_engine_only
def test_answers_that_are_taken_back(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1000 answers of 10 MiB over gRPC, reset while they wait to be sent."""
    message = infer_request("wide", 1)
    with watched(models, max_held_bytes=64 * MIB, max_stream_resets=10_000) as server:
        with budget(capsys, server, "1000 aborted answers of 10 MiB over gRPC", 128 * MIB):
            opening = hoarders.grpc_opening(0)
            with hoarding(lambda: Hoarder(server.grpc, opening), 10) as clients:
                for turn in range(10):
                    streams = range(1 + 20 * turn, 21 + 20 * turn, 2)
                    for client in clients:
                        client.unsent.append(memoryview(hoarders.grpc_requests(message, streams)))
                    push(clients)
                    time.sleep(0.5)
                    for client in clients:
                        client.unsent.append(memoryview(hoarders.resets(streams)))
                    push(clients)
                assert 200 == infer(server)


def test_bombs(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 messages of 60 KB that inflate to 60 MB over gRPC, and as many over REST."""
    packed = hoarders.bomb(BODY_BYTES)
    head = http_request(
        "vector", len(packed), "Inference-Header-Content-Length: 0", "Content-Encoding: gzip"
    )
    grpc = hoarders.grpc_opening(65_535) + hoarders.grpc_requests(
        packed, range(1, 2), compressed=True
    )
    with watched(models, max_held_bytes=128 * MIB) as server:
        for name, make in {
            "gRPC": lambda: Hoarder(server.grpc, grpc),
            "REST": lambda: Hoarder(server.http, head, packed),
        }.items():
            with budget(capsys, server, f"100 gzip bombs of 60 MiB over {name}", 192 * MIB):
                with hoarding(make, 100) as clients:
                    push(clients)
                    time.sleep(3)
                    assert 200 == infer(server)


def test_extensions_of_chunks(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunk extensions are limited, however long the body."""
    head = http_request("vector", -1, "Inference-Header-Content-Length: 0")
    extension = b"1;" + bytes(b"x" * (256 * MIB))
    with watched(models, max_held_bytes=256 * MIB) as server:
        with budget(capsys, server, "20 bodies with 256 MiB of extensions", 64 * MIB):
            with hoarding(lambda: Hoarder(server.http, head, extension), 20) as clients:
                push(clients, 40)
                sent = max(client.sent for client in clients)
                assert 200 == infer(server)
    with capsys.disabled():
        print(f"at most {sent / MIB:.0f} MiB of one were taken (criterion: below 128)")

    assert sent < 128 * MIB


def test_json_that_becomes_much_more(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """50 bodies of 8 MB: two input bytes per number become eight."""
    numbers = b"0," * (4 * MIB - 1) + b"0"
    body = (
        b'{"inputs":[{"name":"x","datatype":"FP64","shape":[2,%d],"data":[' % (2 * MIB)
        + numbers
        + b"]}]}"
    )
    head = http_request("vector", len(body))
    with watched(models, max_held_bytes=128 * MIB) as server:
        with budget(capsys, server, "50 bodies of JSON of 8 MiB", 192 * MIB):
            with hoarding(lambda: Hoarder(server.http, head, body), 50) as clients:
                push(clients, 20)
                time.sleep(3)
                assert 200 == infer(server)


def test_slow_readers_and_writers(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """300 clients that do not read 10 MiB, and 300 that send 2 MB byte by byte."""
    request = http_request("wide", len(WIDE)) + WIDE
    head = http_request("vector", 2 * MIB, "Inference-Header-Content-Length: 0")
    most = (128 + 64) * MIB + 600 * (MIB >> 3)  # limit, executions, and connections
    with watched(models, max_held_bytes=128 * MIB) as server:
        with budget(capsys, server, "300 slow readers and 300 slow writers", most):
            with (
                hoarding(lambda: Hoarder(server.http, request), 300) as readers,
                hoarding(lambda: Hoarder(server.http, head), 300) as writers,
            ):
                for _ in range(5):
                    for writer in writers:
                        writer.unsent.append(memoryview(b"x" * 1000))
                    push([*readers, *writers])
                assert 200 == infer(server)


@own_engine_only
def test_over_tls(models: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """100 unread answers of 10 MiB, with large windows."""
    authority = trustme.CA()
    names = write_certificate(authority, tmp_path)
    context = trusting(authority)
    message = infer_request("wide", 1)
    octets = hoarders.grpc_opening(1 << 30) + bytes(frames.window_update(0, 1 << 30))
    octets += hoarders.grpc_requests(message, range(1, 21, 2))
    with watched(models, max_held_bytes=64 * MIB, **names) as server:
        with budget(capsys, server, "100 answers of 10 MiB over gRPC and TLS", 128 * MIB):
            make = lambda: Hoarder(server.grpc, octets, context=context)  # noqa: E731
            with hoarding(make, 10) as clients:
                push(clients)
                time.sleep(3)
                assert 200 == infer(server)
