"""`xlaserve.serve`: a server for the length of a block, from Python."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xlaserve
from xlaserve.errors import InvalidModel, InvalidRequest
from xlaserve.local.process import ServerProcess
from xlaserve.local.servers import Server

pytest_plugins = ["xlaserve.testing"]

INPUTS = {"x": ("FP32", [-1, 2])}
ONES = {"x": np.ones((1, 2), np.float32)}
QUICK: dict[str, Any] = {"device": "cpu", "compile_processes": 0, "load_threads": 1}


def tiny(params: Any, x: Any) -> Any:
    return {"y": x * params["v"]}


def params(value: float, columns: int = 2) -> dict[str, np.ndarray]:
    return {"v": np.full((1, columns), value, np.float32)}


@pytest.fixture(scope="module", name="server")
def _server(xlaserve_serve: Callable[..., Server]) -> Server:
    """A server for a function, made by the package's pytest fixture."""
    return xlaserve_serve(tiny, params=params(2), inputs=INPUTS, max_batch_size=2, **QUICK)


def answered(server: Server) -> float:
    return float(server.client.infer("tiny", ONES)["y"][0, 0])


def test_a_function_is_served_and_its_parameters_are_replaced(server: Server) -> None:
    server.update(params(2))
    before = answered(server)
    server.update(params(3))
    after = answered(server)
    with pytest.raises(InvalidModel, match="incompatible"):
        server.update(params(4, columns=3))

    assert [2.0, 3.0, 3.0] == [before, after, answered(server)]
    assert ["READY"] == [row.state for row in server.client.index() if row.state != "UNAVAILABLE"]


async def test_the_client_blocks_where_an_event_loop_runs(server: Server) -> None:
    """As in a notebook."""
    server.update(params(5))

    assert 5.0 == answered(server)


def test_a_server_says_where_it_is_and_what_it_does(server: Server) -> None:
    events = [json.loads(line)["event"] for line in server.log.splitlines() if line[:1] == "{"]

    assert "started" in events
    assert f"<xlaserve server at {server.url}, {server.http}: tiny>" == repr(server)
    assert server.http.startswith("http://127.0.0.1:")


@pytest.fixture(name="repository")
def _repository(tmp_path: Path) -> Path:
    """A repository with a working model, and one with an invalid configuration."""
    xlaserve.export_model(tiny, params(7), INPUTS, tmp_path / "seven" / "1", max_batch_size=0)
    (tmp_path / "typo" / "1").mkdir(parents=True)
    (tmp_path / "typo" / "config.pbtxt").write_text("max_batch_size: many\n")
    return tmp_path


async def test_a_directory_is_served_in_a_coroutine(repository: Path) -> None:
    async with xlaserve.serve(str(repository), exit_on_error=False, **QUICK) as server:
        answer = await server.client.infer("seven", ONES)
        with pytest.raises(
            InvalidRequest,
            match=r"this server serves a directory, not a function: export to the directory, then"
            r" call client\.load\(NAME\)",
        ):
            await server.update(params(8))
        reasons = {row.name: row.reason for row in await server.client.index()}
        process = server._running.process
        assert process.is_running

    assert 7.0 == answer["y"][0, 0]
    assert "failed to load 'typo', " in reasons["typo"]
    # The server has drained and exited with the block.
    assert not process.is_running


def test_a_model_that_does_not_load_is_said_with_its_reason(repository: Path) -> None:
    serving = xlaserve.serve(repository, **QUICK)

    with pytest.raises(xlaserve.NotServing, match=r"failed to load 'typo', config\.pbtxt"):
        serving.start()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a setting that is none": (
        lambda: xlaserve.serve(".", devise="cpu"),
        r"serve: 'devise' is not a setting; did you mean 'device'\? \(docs/settings\.md\)",
    ),
    "a setting that resembles none": (
        lambda: xlaserve.serve(".", nonsense=1),
        r"serve: 'nonsense' is not a setting \(docs/settings\.md\)",
    ),
    "several processes": (
        lambda: xlaserve.serve(".", processes=2),
        "serve: processes: expected 1; start `xlaserve serve` for more",
    ),
    "a function without inputs": (
        lambda: xlaserve.serve(tiny, params=params(1)),
        r"serve: a function needs inputs, as inputs=\{'x': \('FP32', \[-1, 3\]\)\}",
    ),
    "a directory with parameters": (
        lambda: xlaserve.serve("models", params=params(1), name="tiny"),
        "serve: params, name: only for functions, got the directory 'models'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_before_anything_starts(what: str) -> None:
    call, text = WRONG[what]

    with pytest.raises((InvalidModel, InvalidRequest), match=text):
        call()


def test_what_the_server_refuses_is_raised_in_its_words(tmp_path: Path) -> None:
    serving = xlaserve.serve(tmp_path / "nowhere", **QUICK)

    with pytest.raises(xlaserve.NotServing, match="expected a directory, got '.*nowhere'"):
        serving.start()


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The end of its stdin stops it, however the parent ends."""
    settings = {"repository": str(tmp_path), "grpc_endpoint": "port:0", "http_endpoint": "none"}
    process = ServerProcess(settings | {name: str(value) for name, value in QUICK.items()})
    try:
        process.started(300)
        assert process._process.stdin is not None
        process._process.stdin.close()

        assert 0 == process._process.wait(120)
    finally:
        process.close()


def test_no_module_can_take_the_place_of_a_public_name() -> None:
    """Importing a subpackage sets its name on the package, replacing what was there."""
    root = Path(xlaserve.__file__).parent
    modules = {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}

    assert set() == modules & set(xlaserve.__all__)
    assert {"serving", "testing", "local"} <= modules


@pytest.mark.parametrize("order", [["serve", "serving"], ["serving", "serve"]])
def test_the_function_and_the_package_in_both_orders(order: list[str]) -> None:
    for name in order:
        if name == "serving":
            __import__("xlaserve.serving")
        else:
            assert "serve" == xlaserve.serve.__name__

    assert callable(xlaserve.serve)
    assert "xlaserve.serving" == sys.modules["xlaserve.serving"].__name__
