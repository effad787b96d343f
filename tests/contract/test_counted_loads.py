"""Loads that fail before a version is known are counted and logged; reloads keep counters."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.http import ask
from support.server import RunningServer, Serve

import xlaserve
from xlaserve.serving.observability import event_notes

LOAD = "/v2/repository/models/{}/load"
FAILED = "xlaserve_model_load_failures_total"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    params = {"v": np.full((1, 2), 2.0, np.float32)}
    xlaserve.export_model(
        lambda p, x: {"y": x * p["v"]},
        params,
        {"x": ("FP32", [-1, 2])},
        root / "double" / "1",
        max_batch_size=8,
    )
    broken = {"text": '{"max_batch_size": "many"}', "gone": None, "field": '{"no_field": 1}'}
    for name, text in broken.items():
        (root / name).mkdir()
        if text is not None:
            (root / name / "1").mkdir()
            (root / name / "config.json").write_text(text)
    return root


@pytest.fixture
async def server(serve: Serve, models: Path) -> AsyncIterator[RunningServer]:
    async with serve(models, http_endpoint="port:0") as running:
        yield running


async def samples(server: RunningServer) -> Mapping[str, float]:
    text = (await ask(str(server.http), "GET", "/metrics")).body.decode()
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in rows}


async def load(server: RunningServer, name: str, parameters: object = None) -> int:
    body = b"" if parameters is None else json.dumps({"parameters": parameters}).encode()
    return (await ask(str(server.http), "POST", LOAD.format(name), body=body)).status


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("text", None),
        ("gone", None),
        ("field", None),
        ("double", {"config": "{"}),
        ("double", {"config": '{"max_batch_size": "many"}'}),
        ("double", {"config": '{"instance_group": [{"count": -1}]}'}),
        ("double", {"config": '{"version_policy": {"specific": {"versions": [7]}}}'}),
    ],
)
async def test_a_load_that_comes_to_no_version_is_counted_and_logged(
    server: RunningServer, name: str, parameters: object
) -> None:
    for count in (1, 2):
        with capture_logs() as log:
            assert 400 == await load(server, name, parameters)
        found = await samples(server)
        told = [line for line in log if line["event"] == "model not loaded"]

        assert count == sum(
            value for row, value in found.items() if row.startswith(f'{FAILED}{{model="{name}"')
        )
        assert [name] == [line["model"] for line in told]
        assert told[0]["reason"]


async def test_a_load_of_no_model_is_none(server: RunningServer) -> None:
    assert 404 == await load(server, "nowhere")

    assert not [row for row in await samples(server) if "nowhere" in row]


async def test_names_of_failed_loads_are_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_notes, "_MAX_FAILED", 1)
    for name in ("text", "field", "gone", "field"):
        assert 400 == await load(server, name)
    rows = {row: value for row, value in (await samples(server)).items() if FAILED in row}

    assert {
        f'{FAILED}{{model="text",version=""}}': 1.0,
        f'{FAILED}{{model="other",version=""}}': 3.0,
    } == rows


INFER = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [5, 2], "data": [0.0] * 10}],
}


async def test_padding_and_executions_do_not_restart_with_a_reload(server: RunningServer) -> None:
    padding = 'xlaserve_padding_rows_total{model="double",version="1"}'
    executions = 'xlaserve_bucket_executions_total{model="double",version="1",rows="6"}'

    async def counts() -> tuple[float | None, float | None]:
        found = await samples(server)
        return found.get(padding), found.get(executions)

    async def infer() -> None:
        body = json.dumps(INFER).encode()
        path = "/v2/models/double/infer"
        assert 200 == (await ask(str(server.http), "POST", path, body=body)).status

    assert 200 == await load(server, "double")
    assert (0, None) == await counts()
    await infer()
    assert (1, 1) == await counts()
    # From now on, five rows have their own bucket.
    assert 200 == await load(server, "double", {"config": '{"max_batch_size": 5}'})
    assert (1, 1) == await counts()
    await infer()
    assert (1, 1) == await counts()
    path = "/v2/repository/models/double/unload"
    assert 200 == (await ask(str(server.http), "POST", path)).status
    assert (1, 1) == await counts()
    assert 200 == await load(server, "double")
    await infer()
    assert (2, 2) == await counts()
