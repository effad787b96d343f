"""What stands beside models: who left it there has it, and another caller of the model has not."""

import ast
import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support import identity_models
from support.conditions import MOST_SECONDS, until
from support.http import Answer, connect, message
from support.python_models import write
from support.repeated import noted_repeats
from support.server import RunningServer, serving
from support.wire import connect as connect_grpc
from support.wire import request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.concurrency.sharing import SingleFlight
from xlaserve.errors.access import HIDDEN
from xlaserve.residence.repository.repository import Repository
from xlaserve.serving.access.objects import BESIDE, Owner
from xlaserve.serving.access.tokens import digest_of, new_token

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, B, OPERATOR = new_token(), new_token(), new_token()
"""Of two callers of `shared*`, of which b may see `theirs` too, and of one that may do all."""
TESTS = {
    "cached answers": "contract/test_owners.py::test_a_cached_answer_is_of_who_asked",
    "executions shared by equal requests": (
        "core/serving/stations/test_caching.py::"
        "test_equal_requests_of_two_callers_share_no_execution"
    ),
    "sequences": "contract/test_owners.py::test_a_sequence_is_of_who_started_it",
    "regions of shared memory in requests": (
        "contract/test_model_rules.py::test_a_region_of_another_caller_is_neither_read_nor_written"
    ),
    "prefix caches of generators": (
        "models/generation/test_prefixes.py::test_principals_do_not_have_rows_of_one_another"
    ),
    "loads in progress": (
        "contract/test_owners.py::test_a_load_of_another_caller_has_its_own_permissions"
    ),
    "models called by a model's code, in errors": (
        "contract/test_owners.py::"
        "test_no_error_of_code_names_a_model_that_it_calls_to_who_may_not_see_it"
    ),
    "steps of an ensemble, in errors, states and reasons": (
        "contract/test_owners.py::test_no_text_names_a_step_to_who_may_not_see_it"
    ),
    "events": (
        "transport/rest/test_events_page.py::"
        "test_an_event_names_neither_hidden_models_nor_other_callers"
    ),
    "models, sums and failures on the page": (
        "contract/test_tenants.py::test_what_one_tenant_does_changes_nothing_that_the_other_reads"
    ),
    "files named in a configuration": "contract/test_configurations_of_clients.py::",
}
"""The test of each thing that is of a caller, or of a model."""
TENSORS = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }]
"""
STATEFUL = f"sequence_batching {{ max_sequence_idle_microseconds: 600000000 }}{TENSORS}"
ECHO = """
class Model(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"]}
"""

CALLS = """
class Model(PythonModel):
    def load(self, context):
        self.context = context

    async def infer(self, inputs):
        return await self.context.infer("theirs", {"z": inputs["x"]})
"""


@dataclass(frozen=True)
class Place:
    server: RunningServer

    async def send(self, method: str, path: str, token: str, body: Any = None) -> Answer:
        assert self.server.http is not None
        async with connect(self.server.http) as client:
            shown = ("authorization", f"Bearer {token}")
            written = b"" if body is None else json.dumps(body).encode()
            return await client.ask(message(method, path, shown, body=written))

    async def infer(self, model: str, token: str, value: float = 1.0, **parameters: Any) -> Answer:
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 2.0]}
        body = {"inputs": [tensor], "parameters": parameters}
        return await self.send("POST", f"/v2/models/{model}/infer", token, body)

    async def infer_message(self, model: str, token: str, value: float) -> str:
        """Ask over gRPC, with the same bytes for the same value; return the status."""
        request = pb.ModelInferRequest(model_name=model)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        tensor.contents.fp32_contents.extend([value, 2.0])
        async with connect_grpc(self.server.url) as wire:
            shown = ("authorization", f"Bearer {token}")
            headers = request_headers("/inference.GRPCInferenceService/ModelInfer", shown)
            return (await wire.trailers(wire.send(headers, request.SerializeToString())))[
                "grpc-status"
            ]

    def cache(self) -> tuple[int, int]:
        """Return the hits and the misses of the model with kept answers."""
        totals = self.server.application.registry.resolve("shared")[0].statistics.totals()
        return totals.cache_hit.count, totals.cache_miss.count


def ensemble(steps: list[str], output: str = "y") -> dict[str, Any]:
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    return {
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": step,
                    "model_version": -1,
                    "input_map": {"x": "x" if at == 0 else f"t{at}"},
                    "output_map": {output: "y"} if step == steps[-1] else {"y": f"t{at + 1}"},
                }
                for at, step in enumerate(steps)
            ]
        },
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("owners")
    models = folder / "models"
    for name in ("shared", "theirs"):
        identity_models.write(models, name, "FP32", [2])
        path = models / name / "config.json"
        cached = {"max_batch_size": 4, "response_cache": {"enable": name == "shared"}}
        path.write_text(json.dumps(json.loads(path.read_text()) | cached))
    (models / "shared-both").mkdir()
    (models / "shared-both" / "config.json").write_text(json.dumps(ensemble(["shared", "theirs"])))
    write(models, "shared-calls", CALLS, f"max_batch_size: 4\n{TENSORS}")
    write(models, "shared-state", ECHO, f"max_batch_size: 4\n{STATEFUL}")
    some = {"allow": ["infer", "metadata", "manage"]}
    every = {"allow": ["infer", "metadata", "manage", "page"]}
    callers = [
        {"name": "operator", "token": digest_of(OPERATOR), **every},
        {"name": "a", "token": digest_of(A), "models": ["shared", "shared-*"], **some},
        {"name": "b", "token": digest_of(B), "models": ["shared", "shared-*", "theirs"], **some},
    ]
    (folder / "rules.json").write_text(json.dumps({"caller": callers}))
    running = serving(
        folder,
        models,
        http_endpoint="port:0",
        load_model=("*",),
        allow_python_models=True,
        access_rules=str(folder / "rules.json"),
    )
    async with running as server:
        yield Place(server)


async def test_everything_that_has_an_owner_has_a_test() -> None:
    """What is of operators no door reads: it has none."""
    assert {one.thing for one in BESIDE if one.owner is not Owner.SERVER} == set(TESTS)
    for named in TESTS.values():
        path, _, name = named.partition("::")
        tree = ast.parse((Path(__file__).parent.parent / path).read_text())
        found = {getattr(node, "name", "") for node in ast.walk(tree)}
        assert not name or name in found, named


# --- of a caller ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
async def test_a_cached_answer_is_of_who_asked(
    place: Place, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """A quick answer would tell what the other one has asked; so would bytes that are known."""
    value = {"REST": 11.0, "gRPC": 12.0}[protocol]
    known = noted_repeats(monkeypatch)
    hits = []
    for token in (A, A, A, B, A, B, B, B):
        before = place.cache()
        if protocol == "REST":
            assert 200 == (await place.infer("shared", token, value)).status
        else:
            assert "0" == await place.infer_message("shared", token, value)
        after = place.cache()
        hits.append((after[0] - before[0], after[1] - before[1]))

    miss, hit = (0, 1), (1, 0)
    assert [miss, hit, hit, miss, hit, hit, hit, hit] == hits
    if protocol == "gRPC":
        assert [False, False, True, False, True, False, True, True] == known


async def test_a_sequence_is_of_who_started_it(place: Place) -> None:
    """Another caller can neither go on with one nor end it, by numbers or by texts."""
    for sequence in (7, "seven"):
        model = "shared-state"
        shown: dict[str, Any] = {"sequence_id": sequence}
        begun = await place.infer(model, A, sequence_start=True, **shown)
        foreign = await place.infer(model, B, sequence_end=True, **shown)
        unknown = await place.infer(model, B, sequence_end=True, sequence_id=8)
        going_on = await place.infer(model, A, **shown)
        own = await place.infer(model, B, sequence_start=True, sequence_end=True, **shown)
        ended = await place.infer(model, A, sequence_end=True, **shown)

        assert [200] * 4 == [one.status for one in (begun, going_on, own, ended)]
        assert (400, 400) == (foreign.status, unknown.status)
        assert foreign.error.replace(str(sequence), "8") == unknown.error


def are_waiting(loads: SingleFlight[None], number: int) -> bool:
    """Tell whether so many loads are under way, whoever may still join them."""
    return number == len(loads._under_way(lambda key: True))


async def test_a_load_of_another_caller_has_its_own_permissions(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two callers load one ensemble at once, whose hidden step is not there: one of them may."""
    repository = "/v2/repository/models"
    assert 200 == (await place.send("POST", f"{repository}/theirs/unload", OPERATOR)).status
    both, find = threading.Event(), Repository.find

    def waiting(self: Repository, *asked: Any, **named: Any) -> Any:
        assert both.wait(MOST_SECONDS)
        return find(self, *asked, **named)

    monkeypatch.setattr(Repository, "find", waiting)
    loads = place.server.application.control._loads
    asked = []
    for number, token in enumerate((A, OPERATOR), 1):
        path = f"{repository}/shared-both/load"
        asked.append(asyncio.ensure_future(place.send("POST", path, token)))
        # Of one caller after the other: the first one is the first to ask what it may do.
        await until(partial(are_waiting, loads, number))
    both.set()
    tenant, operator = await asyncio.gather(*asked)

    assert "theirs" not in tenant.body.decode()
    assert 200 == operator.status
    assert place.server.application.registry.ready("theirs")


# --- of a model -------------------------------------------------------------------------------


async def test_no_text_names_a_step_to_who_may_not_see_it(place: Place) -> None:
    """Neither a configuration, nor the reason of a load that another caller asked for."""
    path = "/v2/repository/models/shared-both/load"
    wrong = {"parameters": {"config": json.dumps(ensemble(["shared", "theirs"], output="z"))}}
    told = await place.send("POST", path, OPERATOR, wrong)
    texts: dict[str, list[str]] = {}
    for token in (A, B):
        rows = await place.send("POST", "/v2/repository/index", token, {})
        config = await place.send("GET", "/v2/models/shared-both/config", token)
        row = next(one for one in rows.json if one["name"] == "shared-both")
        steps = [one["model_name"] for one in config.json["ensemble_scheduling"]["step"]]
        texts[token] = [row["reason"], str(steps)]
    back = await place.send("POST", path, OPERATOR)

    assert 400 == told.status
    assert 200 == back.status
    assert all("theirs" in text for text in texts[B]), texts
    assert not [text for text in texts[A] if "theirs" in text]
    assert all(HIDDEN in text for text in texts[A])


async def test_no_error_of_code_names_a_model_that_it_calls_to_who_may_not_see_it(
    place: Place,
) -> None:
    """Neither where that is not there nor where it is asked wrongly; a caller that may is told."""
    repository = "/v2/repository/models/theirs"
    told = {}
    for state in ("wrong", "absent"):
        if state == "absent":
            assert 200 == (await place.send("POST", f"{repository}/unload", OPERATOR)).status
        for token in (A, B):
            rest = await place.infer("shared-calls", token)
            over_grpc = await place.infer_message("shared-calls", token, 1.0)
            told[state, token] = rest.status, over_grpc, rest.error
    back = await place.send("POST", f"{repository}/load", OPERATOR)

    assert 200 == back.status
    for state, status in (("wrong", (400, "3")), ("absent", (404, "9"))):
        assert status == told[state, A][:2] == told[state, B][:2]
        assert "'theirs'" in told[state, B][2]
        assert told[state, B][2].replace("'theirs'", HIDDEN) == told[state, A][2]
