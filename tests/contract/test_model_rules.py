"""Access rules per model: what callers can reach, and learn about other models.

`theirs` exists and `absent` does not; their names have the same length. A caller of `mine*` must
get byte-identical answers for both.
"""

import gzip
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import h2.events
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from support import identity_models
from support.http import Answer, connect, message
from support.python_models import OWN, VECTORS, write
from support.repeated import noted_repeats
from support.server import RunningServer, serving
from support.wire import connect as connect_grpc
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.app.server import Application
from xlaserve.grpc.methods import ROWS
from xlaserve.http.routing import Route
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.serving.call import Operation
from xlaserve.settings import Settings

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

OF_MODELS = ("infer", "metadata", "manage")
ALL = new_token()
MINE = new_token()
LOADER = new_token()
"""Token of a caller that may manage every model, but infer only with `mine`."""
SPLIT = new_token()
"""Token shared by two callers: one may infer with `mine`, the other read `theirs`."""
HIDDEN, ABSENT = "theirs", "absent"
SERVICE = "/inference.GRPCInferenceService/"
CALLS = """
class Model(PythonModel):
    def load(self, context):
        self.context = context

    async def infer(self, inputs):
        return await self.context.infer("theirs", inputs)
"""


FAILS = """
class Model(PythonModel):
    def infer(self, inputs):
        raise InferenceError("model 'theirs-fails': its secret is out")
"""


def every_route() -> list[Route]:
    settings = Settings.read({}, repository=Path(__file__).parent)
    return list(Application(settings).http_routes().routes)


LIMITED = [route for route in every_route() if route.operation.value in (*OF_MODELS, "readiness")]
OF_A_MODEL = [route for route in LIMITED if "{model}" in route.path]
OF_THE_SERVER = [
    route
    for route in LIMITED
    if "{model}" not in route.path and route.operation is Operation.MANAGE
]
METHODS = {
    path: row for path, row in ROWS.items() if row.model and row.operation is not Operation.RUNTIME
}


@dataclass(frozen=True)
class Place:
    server: RunningServer

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http

    async def ask(self, method: str, path: str, token: str = MINE, body: bytes = b"") -> Answer:
        async with connect(self.http) as client:
            shown = ("authorization", f"Bearer {token}")
            return await client.ask(message(method, path, shown, body=body, length=-1))

    async def call(self, path: str, body: bytes, token: str = MINE) -> Any:
        """Return the status, message, and response messages of a request."""
        async with connect_grpc(self.server.url) as wire:
            shown = ("authorization", f"Bearer {token}")
            stream = wire.open(request_headers(path, shown))
            wire.h2.send_data(stream, framed(body), end_stream=True)
            wire.flush()
            await wire.until(h2.events.StreamEnded, stream)
            mine = [e for e in wire.events if getattr(e, "stream_id", None) == stream]
            data = b"".join(e.data for e in mine if isinstance(e, h2.events.DataReceived))
            block: Any = [e for e in mine if hasattr(e, "headers")][-1]
            fields = dict(block.headers)
            return fields["grpc-status"], fields.get("grpc-message", ""), data


def ensemble(*steps: str) -> dict[str, Any]:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    names = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
    return {
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": step,
                    "model_version": -1,
                    "input_map": {"x": names[number]},
                    "output_map": {"y": names[number + 1]},
                }
                for number, step in enumerate(steps)
            ]
        },
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("rules")
    models = folder / "models"
    for name in ("mine", HIDDEN):
        identity_models.write(models, name, "FP32")
    config = json.loads((models / HIDDEN / "config.json").read_text())
    (models / HIDDEN / "config.json").write_text(
        json.dumps(config | {"response_cache": {"enable": True}})
    )
    (models / "mine-both").mkdir()
    (models / "mine-both" / "config.json").write_text(json.dumps(ensemble("mine", HIDDEN)))
    (models / "their-both").mkdir()
    (models / "their-both" / "config.json").write_text(json.dumps(ensemble("mine", HIDDEN)))
    write(models, "mine-calls", CALLS, VECTORS, begin=OWN)
    write(models, "theirs-fails", FAILS, VECTORS, begin=OWN)
    (models / "mine-fails").mkdir()
    (models / "mine-fails" / "config.json").write_text(json.dumps(ensemble("theirs-fails")))
    file = folder / "rules.json"
    callers: list[dict[str, Any]] = [
        {"name": "ops", "token": digest_of(ALL), "allow": [*OF_MODELS, "health"]},
        {
            "name": "tenant",
            "token": digest_of(MINE),
            "allow": [*OF_MODELS, "health"],
            "models": ["mine", "mine-*"],
        },
        {"name": "m", "token": digest_of(LOADER), "allow": ["manage"]},
        {"name": "i", "token": digest_of(LOADER), "allow": ["infer"], "models": ["mine"]},
        {"name": "a", "token": digest_of(SPLIT), "allow": ["infer"], "models": "mine"},
        {"name": "b", "token": digest_of(SPLIT), "allow": ["metadata"], "models": "theirs"},
    ]
    file.write_text(json.dumps({"caller": callers}))
    running = serving(
        folder,
        models,
        http_endpoint="port:0",
        load_model=("*",),
        allow_python_models=True,
        shared_memory="all",
        trace_file=str(folder / "traces"),
        access_rules=str(file),
    )
    async with running as server:
        yield Place(server)


def infer_json() -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}
    ).encode()


def infer_message(model: str) -> bytes:
    request = pb.ModelInferRequest(
        model_name=model, raw_input_contents=[np.ones(2, np.float32).tobytes()]
    )
    request.inputs.add(name="x", datatype="FP32", shape=[2])
    return bytes(request.SerializeToString())


def bare(answer: Answer, model: str) -> tuple[int, dict[str, str], bytes]:
    """Return an answer without its date and the model's name."""
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status, headers, answer.body.replace(model.encode(), b"")


# --- Hidden models -------------------------------------------------------------------------------


@pytest.mark.parametrize("route", OF_A_MODEL, ids=lambda route: f"{route.method} {route.path}")
async def test_over_http_a_hidden_model_is_one_that_is_not_there(
    place: Place, route: Route
) -> None:
    names = {"version": "1", "repository": "r"}
    bodies = (b"",) if route.method == "GET" else (infer_json(), b"{}", b"no json")
    for body in bodies:
        found = [
            bare(
                await place.ask(
                    route.method, route.path.format_map({"model": m, **names}), body=body
                ),
                m,
            )
            for m in (HIDDEN, ABSENT)
        ]
        everybody = await place.ask(
            route.method, route.path.format_map({"model": ABSENT, **names}), ALL, body
        )

        assert found[0] == found[1]
        assert found[0][0] in (400, 404, 501)
        if found[0][0] == 404 and "trace" not in route.path:
            assert found[0] == bare(everybody, ABSENT)
    assert (await place.ask("GET", f"/v2/models/{HIDDEN}/ready", ALL)).status == 200


@pytest.mark.parametrize("path", METHODS)
async def test_over_grpc_a_hidden_model_is_one_that_is_not_there(place: Place, path: str) -> None:
    row = METHODS[path]
    kind = {"ModelInfer": infer_message}.get(path.removeprefix(SERVICE))

    def body(model: str) -> bytes:
        if kind is not None:
            return kind(model)
        request = getattr(pb, path.removeprefix(SERVICE) + "Request")
        return bytes(request(**{row.model: model}).SerializeToString())

    found = {model: await place.call(path, body(model)) for model in (HIDDEN, ABSENT)}
    everybody = await place.call(path, body(ABSENT), ALL)

    assert "5" == found[HIDDEN][0]
    assert found[HIDDEN][1].replace(HIDDEN, "") == found[ABSENT][1].replace(ABSENT, "")
    assert everybody == found[ABSENT]
    if not path.endswith("Unload"):
        assert "0" == (await place.call(path, body("mine")))[0]


@pytest.mark.parametrize("compressed", [False, True])
async def test_a_mistake_in_a_request_does_not_tell_either(place: Place, compressed: bool) -> None:
    """On the fast path, and on the general path, which handles compressed requests."""
    found = []
    for model in (HIDDEN, ABSENT):
        request = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"123"])
        request.inputs.add(name="x", datatype="FP32", shape=[2])
        body = bytes(request.SerializeToString())
        async with connect_grpc(place.server.url) as wire:
            shown = [("authorization", f"Bearer {MINE}")]
            if compressed:
                body, shown = gzip.compress(body), [*shown, ("grpc-encoding", "gzip")]
            stream = wire.open(request_headers(f"{SERVICE}ModelInfer", *shown))
            frame = bytes([compressed]) + framed(body)[1:]
            wire.h2.send_data(stream, frame, end_stream=True)
            wire.flush()
            fields = await wire.trailers(stream)
            found.append((fields["grpc-status"], fields["grpc-message"].replace(model, "")))

    assert "5" == found[0][0]
    assert found[0] == found[1]


async def test_methods_whose_model_is_not_in_a_row_do_not_tell_either(place: Place) -> None:
    """Inference streams, trace settings, and model health."""

    def health(model: str) -> bytes:
        return bytes(health_pb2.HealthCheckRequest(service=model).SerializeToString())

    def trace(model: str) -> bytes:
        return bytes(pb.TraceSettingRequest(model_name=model).SerializeToString())

    for path, body, seen in (
        (f"{SERVICE}ModelStreamInfer", infer_message, "0"),
        (f"{SERVICE}TraceSetting", trace, "0"),
        ("/grpc.health.v1.Health/Check", health, "0"),
    ):
        hidden, absent, mine = [
            await place.call(path, body(model)) for model in (HIDDEN, ABSENT, "mine")
        ]
        assert [str(part).replace(HIDDEN, ABSENT) for part in hidden] == [str(p) for p in absent]
        assert seen == mine[0]
        assert hidden != mine
        assert (await place.call(path, body(HIDDEN), ALL))[0] == "0"


async def test_an_answer_that_is_kept_is_for_those_who_may_see_the_model(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a request has the same bytes as another caller's, whose answer is cached."""
    again = noted_repeats(monkeypatch)
    body, path = infer_message(HIDDEN), f"{SERVICE}ModelInfer"
    statuses = [(await place.call(path, body, ALL))[0] for _ in range(3)]
    hidden = await place.call(path, body)

    assert ["0", "0", "0"] == statuses
    assert [True, False] == again[-2:]
    assert "5" == hidden[0]


async def test_lists_have_what_the_caller_may_see(place: Place) -> None:
    mine = ["mine", "mine-both", "mine-calls", "mine-fails"]
    index = await place.call(f"{SERVICE}RepositoryIndex", b"")
    statistics = await place.call(f"{SERVICE}ModelStatistics", b"")
    health = await place.call("/grpc.health.v1.Health/List", b"")
    found: dict[str, Callable[[Any], list[str]]] = {
        "/v2/models": lambda a: a["models"],
        "/v2/models/stats": lambda a: sorted(m["name"] for m in a["model_stats"]),
        "/models": lambda a: [m["modelName"] for m in a["models"]],
    }

    for path, names in found.items():
        assert mine == names((await place.ask("GET", path)).json)
        assert {HIDDEN, *mine} < set(names((await place.ask("GET", path, ALL)).json))
    rows = (await place.ask("POST", "/v2/repository/index", body=b"{}")).json
    assert mine == [row["name"] for row in rows]
    for _, _, data in (index, statistics, health):
        assert b"mine-both" in data
        assert b"their" not in data


async def test_no_model_is_the_only_one_that_cannot_be_seen(place: Place) -> None:
    """`POST /invocations` names no model; the error must not reveal how many there are."""
    answer = await place.ask("POST", "/invocations", SPLIT, infer_json())
    several = await place.ask("POST", "/invocations", body=infer_json())

    assert 200 == answer.status
    assert "4 models are loaded" in several.error


# --- Models named inside a request ---------------------------------------------------------------


@pytest.mark.parametrize("model", ["mine-both", "mine-calls"])
async def test_who_may_infer_a_model_needs_no_permission_for_its_parts(
    place: Place, model: str
) -> None:
    path = f"/v2/models/{model}/infer"
    over_http = await place.ask("POST", path, body=infer_json())
    over_grpc = await place.call(f"{SERVICE}ModelInfer", infer_message(model))

    assert [1, 2] == over_http.json["outputs"][0]["data"]
    assert "0" == over_grpc[0]


async def load(place: Place, name: str, steps: list[str], token: str = MINE) -> Answer:
    body = {"parameters": {"config": json.dumps(ensemble(*steps))}}
    return await place.ask(
        "POST", f"/v2/repository/models/{name}/load", token, json.dumps(body).encode()
    )


async def test_nobody_makes_an_ensemble_over_models_that_it_may_not_see(place: Place) -> None:
    hidden, absent = [await load(place, "mine-both", [name]) for name in (HIDDEN, ABSENT)]
    seen = await load(place, "mine-both", ["mine", "mine"])
    again = await place.ask("POST", "/v2/repository/models/mine-both/load", ALL)

    assert 200 == seen.status == again.status
    assert bare(hidden, HIDDEN) == bare(absent, ABSENT)
    assert f"'{HIDDEN}' is not in the model repository" in hidden.error


async def test_who_may_load_a_model_may_not_infer_with_it_through_an_ensemble(
    place: Place,
) -> None:
    hidden, absent = [await load(place, "mine-both", [name], LOADER) for name in (HIDDEN, ABSENT)]
    seen = await load(place, "mine-both", ["mine", "mine"], LOADER)
    again = await place.ask("POST", "/v2/repository/models/mine-both/load", ALL)

    assert 200 == seen.status == again.status
    assert bare(hidden, HIDDEN) == bare(absent, ABSENT)


async def test_a_load_of_an_ensemble_brings_back_no_step_that_its_owner_unloaded(
    place: Place,
) -> None:
    """Nor are its name or state revealed over any protocol."""
    repository = "/v2/repository/models"
    assert 200 == (await place.ask("POST", f"{repository}/{HIDDEN}/unload", ALL)).status
    told: list[Any] = [await place.ask("POST", f"{repository}/mine-both/load")]
    for _ in range(3):
        told.append(await place.ask("POST", "/v2/models/mine-both/infer", body=infer_json()))
        told.append(await place.call(f"{SERVICE}ModelInfer", infer_message("mine-both")))
    told.append(await place.ask("GET", "/v2/models/mine-both/ready"))
    told.append(await place.ask("POST", "/v2/repository/index", body=b"{}"))
    rows = (await place.ask("POST", "/v2/repository/index", ALL, b"{}")).json
    back = await place.ask("POST", f"{repository}/mine-both/load", ALL)

    assert 400 == told[0].status
    assert "this caller may not load it" in told[0].error
    assert [503] * 3 == [answer.status for answer in told[1:7:2]]
    assert ["14"] * 3 == [answer[0] for answer in told[2:7:2]]
    assert not [answer for answer in told if HIDDEN in str(answer)]
    assert "UNAVAILABLE" == next(row["state"] for row in rows if row["name"] == HIDDEN)
    assert "its step 'theirs' is not ready" in str(rows)
    assert 200 == back.status


async def test_what_fails_in_a_hidden_step_is_told_without_its_name(place: Place) -> None:
    over_http = await place.ask("POST", "/v2/models/mine-fails/infer", body=infer_json())
    over_grpc = await place.call(f"{SERVICE}ModelInfer", infer_message("mine-fails"))
    owner = await place.ask("POST", "/v2/models/mine-fails/infer", ALL, infer_json())

    assert 400 == over_http.status == owner.status
    assert "3" == over_grpc[0]
    assert "'theirs-fails'" not in over_http.error + over_grpc[1]
    assert "model (hidden from this caller)" in over_http.error
    assert "model 'theirs-fails'" in owner.error


async def test_unload_dependents_unloads_none_that_the_caller_may_not_manage(
    place: Place,
) -> None:
    body = json.dumps({"parameters": {"unload_dependents": True}}).encode()
    path = "/v2/repository/models/mine/unload"
    assert (await place.ask("POST", path, body=body)).status == 200
    rows = (await place.ask("POST", "/v2/repository/index", ALL, b"{}")).json
    states = {row["name"]: (row["state"], row.get("reason", "")) for row in rows}
    for name in ("mine", "mine-both"):
        assert (await place.ask("POST", f"/v2/repository/models/{name}/load")).status == 200

    assert ("UNAVAILABLE", "unloaded") == states["mine-both"] == states["mine"]
    assert ("UNAVAILABLE", "its step 'mine' is not ready") == states["their-both"]
    assert "READY" == states[HIDDEN][0]


# --- Server-wide operations ----------------------------------------------------------------------


@pytest.mark.parametrize("route", OF_THE_SERVER, ids=lambda route: f"{route.method} {route.path}")
async def test_who_manages_some_models_changes_nothing_of_the_server(
    place: Place, route: Route
) -> None:
    bodies: dict[str, Any] = {
        "/models": {"model_name": "mine-new", "url": str(Path("/models/theirs"))},
        "/v2/logging": {"log_verbose_level": 1},
        "/v2/trace/setting": {"trace_rate": "7"},
    }
    body: Any = bodies.get(route.path, {"key": "/k", "offset": 0, "byte_size": 4})
    path = route.path.replace("{region}", "r")
    answer = await place.ask(route.method, path, body=json.dumps(body).encode())

    if answer.status == 501 and "cudasharedmemory" in route.path:
        return  # registration fails for everybody where JAX does not run on CUDA
    assert 403 == answer.status
    assert answer.error.startswith("caller 'tenant' may not manage the whole server: ")


# --- Several callers with one token --------------------------------------------------------------


async def test_each_caller_that_a_token_is_of_adds_its_models(place: Place) -> None:
    """Models visible without this permission give 403; other models seem not to exist."""
    found = {}
    for model in ("mine", HIDDEN, ABSENT):
        path = f"/v2/models/{model}"
        infer = await place.ask("POST", f"{path}/infer", SPLIT, infer_json())
        found["infer", model] = infer.status
        found["metadata", model] = (await place.ask("GET", path, SPLIT)).status
        found["ready", model] = (await place.ask("GET", f"{path}/ready", SPLIT)).status
    refused = await place.ask("GET", "/v2/models/mine", SPLIT)

    assert [200, 403, 200] == [found[verb, "mine"] for verb in ("infer", "metadata", "ready")]
    assert [403, 200, 200] == [found[verb, HIDDEN] for verb in ("infer", "metadata", "ready")]
    assert [404, 404, 404] == [found[verb, ABSENT] for verb in ("infer", "metadata", "ready")]
    assert refused.error.startswith("caller 'b' may not metadata model 'mine': ")


# --- Another caller's shared memory --------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", name="region")
async def _region(place: Place) -> AsyncIterator[shared_memory.SharedMemory]:
    """A 16-byte region that the operator has registered as `r`."""
    memory = shared_memory.SharedMemory(create=True, size=16)
    path = "/v2/systemsharedmemory/region"
    body = json.dumps({"key": memory.name, "offset": 0, "byte_size": 16}).encode()
    try:
        assert 200 == (await place.ask("POST", f"{path}/r/register", ALL, body)).status
        yield memory
        assert 200 == (await place.ask("POST", f"{path}/r/unregister", ALL, b"{}")).status
    finally:
        memory.close()
        memory.unlink()


def shared_json(region: str, *, output: bool) -> bytes:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32"}
    place = {"shared_memory_region": region, "shared_memory_byte_size": 8}
    inputs = [tensor | ({"data": [1, 2]} if output else {"parameters": place})]
    outputs = [{"name": "y", "parameters": place if output else {}}]
    return json.dumps({"inputs": inputs, "outputs": outputs}).encode()


def shared_message(region: str, *, output: bool) -> bytes:
    request = pb.ModelInferRequest(model_name="mine")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[2])
    wanted = request.outputs.add(name="y")
    if output:
        request.raw_input_contents.append(np.ones(2, np.float32).tobytes())
    holder = wanted if output else tensor
    holder.parameters["shared_memory_region"].string_param = region
    holder.parameters["shared_memory_byte_size"].int64_param = 8
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("output", [False, True], ids=["input", "output"])
async def test_a_region_of_another_caller_is_neither_read_nor_written(
    place: Place, region: shared_memory.SharedMemory, output: bool
) -> None:
    """It seems not to exist, even between requests of its owner."""
    path = "/v2/models/mine/infer"
    for _ in range(3):
        owner = await place.ask("POST", path, ALL, shared_json("r", output=output))
        assert 200 == owner.status
        for _ in range(3):  # repeat until its references are cached
            message = shared_message("r", output=output)
            assert "0" == (await place.call(f"{SERVICE}ModelInfer", message, ALL))[0]
        held = region.buf
        assert held is not None
        before = bytes(held)
        over_http = [
            bare(await place.ask("POST", path, body=shared_json(name, output=output)), f"'{name}'")
            for name in ("r", "q")
        ]
        over_grpc = [
            await place.call(f"{SERVICE}ModelInfer", shared_message(name, output=output))
            for name in ("r", "q")
        ]

        assert over_http[0] == over_http[1]
        assert 400 == over_http[0][0]
        assert ["3", "3"] == [answer[0] for answer in over_grpc]
        assert over_grpc[0][1] == over_grpc[1][1].replace("'q'", "'r'")
        assert before == bytes(held)


@pytest.mark.usefixtures("region")
async def test_regions_are_listed_to_their_owner_and_to_who_manages_everything(
    place: Place,
) -> None:
    path = "/v2/systemsharedmemory"
    listed = {
        token: [row["name"] for row in (await place.ask("GET", f"{path}/status", token)).json]
        for token in (ALL, MINE)
    }
    named = [bare(await place.ask("GET", f"{path}/region/{n}/status"), f"'{n}'") for n in "rq"]
    over_grpc = await place.call(f"{SERVICE}SystemSharedMemoryStatus", b"")

    assert {ALL: ["r"], MINE: []} == listed
    assert named[0] == named[1]
    assert ("0", "", b"") == (over_grpc[0], over_grpc[1], over_grpc[2][5:])
