"""`xlaserve infer` and `health`, over each protocol, with and without TLS."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
import typer
from support.server import Serve
from support.tls import write_certificate
from typer.testing import CliRunner

from xlaserve.cli.asking.connection import TOKEN_FILE
from xlaserve.cli.asking.infer import infer
from xlaserve.cli.bench.command import bench
from xlaserve.cli.health import health
from xlaserve.client import AsyncClient
from xlaserve.dialing.address import InvalidToken
from xlaserve.errors import XlaserveError
from xlaserve.serving.access.tokens import digest_of, new_token

ONES = f"--input=x=[[{','.join(['1'] * 16)}]]"
QUICK = ("--duration", "100ms", "--warmup", "0s", "--concurrency", "1")


def _invoke(command: Callable[..., None], arguments: tuple[str, ...]) -> str:
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(command)
    result = CliRunner().invoke(application, list(arguments), env={"COLUMNS": "80"})
    if result.exception is not None:
        raise result.exception
    return result.output


async def invoke(command: Callable[..., None], *arguments: str) -> str:
    """Run a command in a thread, because it has its own event loop."""
    return await asyncio.to_thread(_invoke, command, arguments)


async def test_the_same_answer_over_both_protocols(
    example_models: Path, serve: Serve, tmp_path: Path
) -> None:
    # Its log is beside what the command prints: in threads, it has nothing to say of the model.
    settings = {"load_model": ("identity",), "http_endpoint": "port:0"}
    async with serve(example_models, inline_execution_seconds=0.0, **settings) as server:
        urls = (server.url, f"grpc://{server.url}", f"http://{server.http}/")
        ready = [await invoke(health, "--url", url) for url in urls]
        alive = await invoke(health, "--live", "--url", urls[2])
        shown = [await invoke(infer, "identity", ONES, "--url", url) for url in urls]
        written = [
            json.loads(await invoke(infer, "identity", ONES, "--json", "--url", url))
            for url in urls
        ]
        path = tmp_path / "out.npz"
        told = await invoke(infer, "identity", ONES, "--output", str(path), "--url", urls[2])
        versioned = ("identity", ONES, "--version", "1", "--url", urls[2])
        assert "identity version 1" in await invoke(infer, *versioned)
        with pytest.raises(XlaserveError, match="HTTP 404: .*unknown model: 'none'"):
            await invoke(infer, "none", "--url", urls[2])
        with pytest.raises(XlaserveError, match="unexpected inference input 'z', it has 'x'"):
            await invoke(infer, "identity", ONES, "--input=z=1", "--url", urls[0])

    assert [f"{url}: ready\n" for url in urls] == ready
    assert f"{urls[2]}: live\n" == alive
    assert {"y FP32[1,16]\n[[1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1.]]\n"} == {
        text.split("\n", 1)[1] for text in shown
    }
    assert [{"name": "y", "datatype": "FP32", "shape": [1, 16], "data": [[1] * 16]}] * 3 == [
        answer["outputs"][0] for answer in written
    ]
    assert f"identity version 1\ny FP32[1,16]\nwritten to {path}\n" == told.replace("\n/", " /")
    assert (np.load(path)["y"] == 1).all()


async def test_clients_over_tls(example_models: Path, serve: Serve, tmp_path: Path) -> None:
    """Each command, with the client certificate that the server requires and without."""
    authority = trustme.CA()
    settings = write_certificate(authority, tmp_path)
    ca, mine = tmp_path / "ca.pem", tmp_path / "mine.pem"
    ca.write_bytes(authority.cert_pem.bytes())
    issued = authority.issue_cert("client.example")
    mine.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
    settings["tls_client_ca"] = str(ca)
    async with serve(example_models, load_model=("identity",), **settings) as server:
        url = f"grpcs://localhost:{server.url.rpartition(':')[2]}"
        known = ("--url", url, "--tls-ca", str(ca), "--tls-certificate", str(mine))
        assert f"{url}: ready\n" == await invoke(health, *known)
        assert "[[1. 1." in await invoke(infer, "identity", ONES, *known)
        assert "identity, grpc" in await invoke(bench, "identity", *known, *QUICK)
        insecure = (*known[:2], *known[4:], "--tls-insecure")
        assert f"{url}: ready\n" == await invoke(health, *insecure)

        with pytest.raises(XlaserveError, match="certificate verify failed"):
            await invoke(health, "--url", url)
        with pytest.raises(XlaserveError, match=url):
            await invoke(health, *known[:4])
        with pytest.raises(XlaserveError, match="the connection broke"):
            await invoke(health, "--url", url.replace("grpcs", "grpc"))


async def test_clients_show_a_token(
    example_models: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command and the client, over both protocols, with a valid and an invalid token."""
    token, file, wrong = new_token(), tmp_path / "token", tmp_path / "wrong"
    file.write_text(f"{token}\n")
    wrong.write_text(new_token())
    rules = tmp_path / "rules.json"
    caller = {"name": "ci", "token": digest_of(token), "allow": ["infer", "metadata", "health"]}
    rules.write_text(json.dumps({"caller": [caller]}))
    settings = {"load_model": ("identity",), "http_endpoint": "port:0", "access_rules": str(rules)}
    async with serve(example_models, **settings) as server:
        for url in (server.url, f"http://{server.http}"):
            known = ("--url", url, "--token-file", str(file))
            assert f"{url}: ready\n" == await invoke(health, *known)
            assert "[[1. 1." in await invoke(infer, "identity", ONES, *known)
            assert "identity, " in await invoke(bench, "identity", *known, *QUICK)
            async with AsyncClient(url, token=token) as client:
                assert await client.live()
            with pytest.raises(XlaserveError, match="(?i)unauth|401") as caught:
                await invoke(health, "--url", url, "--token-file", str(wrong))
            assert wrong.read_text() not in str(caught.value)
        with pytest.raises(XlaserveError, match="UNAUTHENTICATED"):
            await invoke(health, "--url", server.url)
        monkeypatch.setenv(TOKEN_FILE, str(file))
        assert f"{server.url}: ready\n" == await invoke(health, "--url", server.url)


@pytest.mark.parametrize(
    "text", [b"", b" \n", b"one two", b"one\r\ntwo", "schl\u00fcssel".encode()]
)
async def test_what_is_no_token_is_not_sent_and_not_shown(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(text)
    with pytest.raises(InvalidToken, match="expected one line") as caught:
        await invoke(health, "--token-file", str(file))

    assert all(word not in str(caught.value) for word in ("two", "schl"))


@asynccontextmanager
async def https_server(authority: trustme.CA) -> AsyncIterator[str]:
    """Serve a model with hand-written JSON answers, as other servers send them."""
    answers = {
        b"GET /at/v2/health/ready": {},
        b"GET /at/v2/models/m": {
            "name": "m",
            "inputs": [{"name": "x", "datatype": "INT32", "shape": [1]}],
        },
        b"POST /at/v2/models/m/infer": {
            "model_name": "m",
            "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [[1.5, 2]]},
                {"name": "z", "datatype": "BYTES", "shape": [1], "data": ["text"]},
            ],
        },
    }
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found: Any = answers.get(head.split(b" HTTP")[0])
        body = json.dumps(found).encode()
        status = b"404 Not Found" if found is None else b"200 OK"
        length = b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(b"HTTP/1.1 " + status + length + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "localhost", ssl=context) as server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}/at"


async def test_another_server_over_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.cert_pem.bytes())
    async with https_server(authority) as url:
        known = ("--url", url, "--tls-ca", str(ca))
        assert f"{url}: ready\n" == await invoke(health, *known)
        shown = await invoke(infer, "m", "--input=x=[1]", *known)
        with pytest.raises(XlaserveError, match="certificate verify failed"):
            await invoke(health, "--url", url)
        with pytest.raises(XlaserveError, match="HTTP 404"):
            await invoke(health, "--live", *known)

    assert 'y FP32[1,2]\n[[1.5 2. ]]\nz BYTES[1]\n["text"]\n' == shown.split("\n", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--url", "ftp://h:1"),
            "expected one of grpc://, grpcs://, http://, https://, http+unix:// or unix",
        ),
        (("--url", "http://u:p@h:1"), "expected http://host:port"),
        (("--url", "grpc://h:1/path"), "expected host:port or unix:path"),
        (("--url", "h:99999"), "expected host:port or unix:path"),
        (("--url", "h:1", "--tls-ca", "x"), "grpcs:// or https:// with options for TLS"),
        (("--url", "grpcs://h:1", "--tls-ca", "none.pem"), "none.pem: [Errno 2] No such file"),
        (("--token-file", "none.txt"), "--token-file: 'none.txt' cannot be read"),
        (("--labels", "none.txt"), "--labels: 'none.txt' cannot be read"),
    ],
)
async def test_a_mistake_is_said(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(XlaserveError) as caught:
        await invoke(infer, "m", *arguments)

    assert text in str(caught.value)


async def test_an_input_that_is_no_array_is_said(
    example_models: Path, serve: Serve, tmp_path: Path
) -> None:
    broken, several = tmp_path / "broken.npy", tmp_path / "several.npz"
    broken.write_bytes(b"text")
    np.savez(several, a=np.zeros(1))
    async with serve(example_models, load_model=("identity",)) as server:
        for path in (broken, several, tmp_path / "none.npy"):
            with pytest.raises(XlaserveError, match=f"input 'x'.*{path.name}"):
                await invoke(infer, "identity", f"--input=x=@{path}", "--url", server.url)


CLASSIFIER = """
backend: "identity" max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }]
"""


async def test_classes_have_the_labels_of_the_server(serve: Serve, tmp_path: Path) -> None:
    """Labels too long for the metadata are available with --classes."""
    for name, labels in (
        ("few", "cat\ndog: old\n\x1b[2Jfox\n"),
        ("long", "a\nb\nc\n" + ("x" * 1000 + "\n") * 20),
    ):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(CLASSIFIER)
        (tmp_path / "models" / name / "labels.txt").write_text(labels)
    row = ("--input=x=[[0.25, 2, 1]]",)
    rows = ("--input=x=[[0.25, 2, 1], [3, 0, 0]]", "--classes", "1")
    async with serve(tmp_path / "models", load_model=("*",), http_endpoint="port:0") as server:
        for url in (server.url, f"http://{server.http}"):
            best = await invoke(infer, "few", *row, "--url", url)
            two = await invoke(infer, "few", *rows, "--url", url)
            long = await invoke(infer, "long", *row, "--classes", "2", "--url", url)
            plain = await invoke(infer, "long", *row, "--url", url)
            own = tmp_path / "own.txt"
            own.write_text("a\nb\nc\n")
            given = await invoke(infer, "few", *row, "--labels", str(own), "--url", url)
            written = json.loads(await invoke(infer, "few", *row, "--json", "--url", url))

            cells = [line.strip("│ ").split("│") for line in best.splitlines() if "│" in line]
            assert [["1", "dog: old", "2.000000"], ["2", "\\x1b[2Jfox", "1.000000"]] == [
                [cell.strip() for cell in line] for line in cells[:2]
            ]
            assert "y FP32[-1,3]" in best
            assert "dog: old" in two
            assert "cat" in two
            assert "fox" not in two
            assert "│ b " in long
            assert "[[0.25 2.   1.  ]]" in plain
            assert "│ b " in given
            assert [[0.25, 2, 1]] == written["outputs"][0]["data"]
