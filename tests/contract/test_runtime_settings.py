"""The trace and logging extensions, with the stock clients over both transports."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from google.protobuf.json_format import MessageToDict
from support import identity_models
from support.server import RunningServer, Serve
from support.stock import KINDS, Stock, stock_client

ORDER = (
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
)
STAMPS = {
    "grpc": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"),
    "http": ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"),
}
"""Times of the transports, as Triton calls them: two before and two behind those of the request."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("echo", "other"):
        identity_models.write(root, name, "FP32")
    return root


@pytest.fixture
async def server(serve: Serve, models: Path, tmp_path: Path) -> AsyncIterator[RunningServer]:
    file = str(tmp_path / "trace.json")
    async with serve(models, load_model=("*",), http_endpoint="port:0", trace_file=file) as running:
        yield running


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Stock]:
    async with stock_client(request.param, server) as connected:
        yield connected


def plain(answer: Any) -> dict[str, Any]:
    """Return the settings of an answer, whichever transport it came by."""
    if isinstance(answer, dict):
        return answer
    settings = MessageToDict(answer, preserving_proto_field_name=True)["settings"]
    return {
        name: value.get("value", next(iter(value.values()), "")) for name, value in settings.items()
    }


def text(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


async def infer(client: Stock, model: str, **options: Any) -> None:
    tensor = client.input("x", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    await client.ask("infer", model, [tensor], **options)


async def traces(path: Path, expected: int) -> list[dict[str, Any]]:
    """Wait for so many traces, and return the objects of the file."""
    async with asyncio.timeout(20):
        while True:
            with suppress(FileNotFoundError, json.JSONDecodeError):  # while it is written
                found = json.loads(path.read_text())
                if len(found) >= 2 * expected:
                    return list(found)
            await asyncio.sleep(0.02)


# --- traces ---


async def test_requests_are_traced_while_it_is_on(
    client: Stock, server: RunningServer, tmp_path: Path
) -> None:
    gates = server.application.gates
    idle = gates._observers
    before = plain(await client.ask("get_trace_settings"))
    await infer(client, "echo")
    after = plain(
        await client.ask(
            "update_trace_settings",
            settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"},
        )
    )
    for index in range(4):
        await infer(client, "echo", request_id=f"r{index}")
    found = await traces(tmp_path / "trace.json", 2)
    left = plain(await client.ask("get_trace_settings"))

    assert ("OFF", "1000", "-1", "0", "triton") == tuple(
        text(before[name])
        for name in ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_mode")
    )
    assert str(tmp_path / "trace.json") == text(before["trace_file"])
    assert ("TIMESTAMPS", "1", "2") == tuple(
        text(after[name]) for name in ("trace_level", "trace_rate", "trace_count")
    )
    assert "0" == text(left["trace_count"])
    heads, times = found[::2], found[1::2]
    stamps = STAMPS[client.kind.partition(".")[0]]
    assert [("echo", 1, "r0"), ("echo", 1, "r1")] == [
        (head["model_name"], head["model_version"], head["request_id"]) for head in heads
    ]
    assert [head["id"] for head in heads] == [each["id"] for each in times] == [1, 2]
    for each in times:
        assert [*stamps[:2], *ORDER, *stamps[2:]] == [stamp["name"] for stamp in each["timestamps"]]
        moments = [stamp["ns"] for stamp in each["timestamps"]]
        assert sorted(moments) == moments
    assert idle == gates._observers


async def test_traces_may_begin_with_the_server(serve: Serve, models: Path, tmp_path: Path) -> None:
    """As --trace-config of tritonserver; what is cleared is again what the server began with."""
    settings = {
        "trace_file": str(tmp_path / "trace.json"),
        "trace_level": "TIMESTAMPS",
        "trace_rate": 2,
        "trace_count": 3,
        "trace_log_frequency": 1,
    }
    async with serve(models, load_model=("*",), http_endpoint="port:0", **settings) as server:
        async with stock_client("http.aio", server) as client:
            for index in range(4):
                await infer(client, "echo", request_id=f"r{index}")
            found = [await traces(tmp_path / f"trace.json.{index}", 1) for index in (0, 1)]
            told = plain(await client.ask("get_trace_settings"))
            await client.ask("update_trace_settings", settings={"trace_rate": "7"})
            cleared = plain(
                await client.ask("update_trace_settings", settings={"trace_rate": None})
            )

    assert ["r1", "r3"] == [head["request_id"] for head, _ in found]
    assert ("TIMESTAMPS", "2", "1") == tuple(
        text(told[name]) for name in ("trace_level", "trace_rate", "trace_count")
    )
    assert "2" == text(cleared["trace_rate"])


async def test_a_model_has_settings_of_its_own(
    client: Stock, server: RunningServer, tmp_path: Path
) -> None:
    """What it does not say is that of all models, and it can be cleared again."""
    on = {"trace_level": ["TIMESTAMPS"]}
    await client.ask("update_trace_settings", settings={"trace_rate": "2", "log_frequency": "1"})
    await client.ask("update_trace_settings", model_name="other", settings=on)
    for _ in range(4):
        await infer(client, "echo")
        await infer(client, "other")
    for index in range(2):
        (head, _) = await traces(tmp_path / f"trace.json.{index}", 1)

        assert "other" == head["model_name"]
    own = plain(await client.ask("get_trace_settings", model_name="other"))
    cleared = plain(
        await client.ask(
            "update_trace_settings", model_name="other", settings={"trace_level": None}
        )
    )

    assert ("TIMESTAMPS", "2") == (text(own["trace_level"]), text(own["trace_rate"]))
    assert "OFF" == text(cleared["trace_level"])
    assert not (tmp_path / "trace.json.2").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace_level": ["LOUD"]}, "parameter 'trace_level': expected OFF or TIMESTAMPS, got L"),
        ({"trace_level": ["TENSORS"]}, "tracing of tensors (trace_level TENSORS) is not impl"),
        ({"trace_rate": "0"}, "parameter 'trace_rate': expected an integer of 1 to 2147483647"),
        ({"trace_count": "-2"}, "parameter 'trace_count': expected an integer of -1 to"),
        ({"trace_rate": "9" * 400}, "parameter 'trace_rate': expected an integer"),
        ({"log_frequency": "x"}, "parameter 'log_frequency': expected an integer of 0 to"),
        ({"trace_file": "/tmp/elsewhere"}, "changing trace_file by a request is not implemented"),
        ({"trace_mode": "opentelemetry"}, "changing trace_mode by a request is not implemented"),
        ({"trace_speed": "1"}, "parameter 'trace_speed': expected one of trace_level,"),
    ],
)
async def test_what_cannot_be_set_is_refused_whole(
    server: RunningServer, change: dict[str, Any], said: str
) -> None:
    for kind in ("grpc.aio", "http.aio"):
        async with stock_client(kind, server) as client:
            asked = {"trace_rate": "7"} | change
            fault = await client.fault("update_trace_settings", settings=asked)
            unknown = await client.fault("get_trace_settings", model_name="nobody")
            left = plain(await client.ask("get_trace_settings"))

            assert said in fault
            assert "unknown model" in unknown
            assert "1000" == text(left["trace_rate"])


async def test_without_a_file_nothing_is_traced(serve: Serve, models: Path) -> None:
    async with (
        serve(models, load_model=("echo",)) as server,
        stock_client("grpc.aio", server) as client,
    ):
        fault = await client.fault(
            "update_trace_settings", settings={"trace_level": ["TIMESTAMPS"]}
        )
        names = (await client.ask("get_server_metadata")).extensions

    assert "tracing is turned off on this server: start it with trace_file" == fault
    assert "trace" not in names


async def test_traces_are_bounded_and_written_to_the_end(
    serve: Serve, models: Path, tmp_path: Path
) -> None:
    """The file is JSON after each write, and once the server has ended."""
    file = tmp_path / "trace.json"
    settings = {"trace_file": str(file), "max_trace_bytes": 4096}
    async with (
        serve(models, load_model=("echo",), **settings) as server,
        stock_client("grpc.aio", server) as client,
    ):
        on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        await client.ask("update_trace_settings", settings=on)
        await infer(client, "echo")
        await traces(file, 1)
        for _ in range(40):
            await infer(client, "echo")
        tracing = server.application.tracing
        async with asyncio.timeout(20):
            while tracing.get().level != "OFF":
                await asyncio.sleep(0.02)
        first = len(json.loads(file.read_text()))
        await client.ask("update_trace_settings", settings=on)
        await infer(client, "echo")

    assert 2 == first
    assert 4 == len(json.loads(file.read_text()))
    assert file.stat().st_size <= 4096


# --- the log ---


async def test_the_log_is_set_while_the_server_runs(client: Stock) -> None:
    names = ("log_info", "log_warning", "log_error", "log_verbose_level")
    before = plain(await client.ask("get_log_settings"))
    changed = {"log_info": False, "log_verbose_level": 1}
    after = plain(await client.ask("update_log_settings", settings=changed))
    logger = structlog.get_logger("test")
    for method in ("debug", "info", "warning", "error"):
        getattr(logger, method)(f"a record of {method}")
    quiet = {"log_warning": False, "log_error": False, "log_verbose_level": 0}
    silent = plain(await client.ask("update_log_settings", settings=quiet))

    assert [True, True, True, 1] == [before[name] for name in names]
    assert ["", "ISO8601"] == [before[name] for name in ("log_file", "log_format")]
    assert [False, True, True, 1] == [after[name] for name in names]
    assert [False, False, False] == [silent[name] for name in names[:3]]
    assert 0 == silent.get("log_verbose_level", 0)


async def test_the_log_takes_back_what_it_gave(client: Stock) -> None:
    before = plain(await client.ask("get_log_settings"))
    again = plain(await client.ask("update_log_settings", settings=before))
    known = plain(await client.ask("update_log_settings", settings={"log_format": "default"}))

    assert before == again == known


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"log_info": 1}, "parameter 'log_info': expected true or false, got 1"),
        (
            {"log_verbose_level": True},
            "'log_verbose_level': expected an integer of 0 to 429",
        ),
        ({"log_file": "/etc/cron.d/x"}, "changing log_file by a request is not implemented"),
        (
            {"log_format": "epoch"},
            "'log_format': expected ISO8601 or default (the same time format",
        ),
        ({"log_colour": "red"}, "parameter 'log_colour': expected one of log_info,"),
    ],
)
async def test_a_log_setting_that_cannot_be_is_refused_whole(
    server: RunningServer, change: dict[str, Any], said: str
) -> None:
    async with stock_client("http.aio", server) as client:
        fault = await client.fault("update_log_settings", settings={"log_warning": False} | change)
        left = await client.ask("get_log_settings")

    assert said in fault
    assert left["log_warning"] is True
