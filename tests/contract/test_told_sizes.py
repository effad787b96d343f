"""Out-of-memory errors show device sizes only to callers that may see all models."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import identity_models
from support.http import ask
from support.server import RunningServer, serving
from tritonclient.utils import InferenceServerException

import xlaserve
from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANT, OPERATOR = new_token(), new_token()
FREE = " bytes on cpu:0, where 1 of 1 are free"


@dataclass(frozen=True)
class Place:
    server: RunningServer

    async def rest(self, path: str, token: str) -> str:
        headers = ("Authorization", f"Bearer {token}")
        return (await ask(str(self.server.http), "POST", path, headers)).body.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("told")
    weights = np.ones(1024, np.float32)
    xlaserve.export_model(
        lambda p, x: {"y": p * x}, weights, {"x": ("FP32", [1024])}, folder / "models/a-new/1"
    )
    identity_models.write(folder / "models", "theirs", "FP32")
    allow = ["infer", "metadata", "manage"]
    rules = [
        {"name": "tenant", "token": digest_of(TENANT), "allow": allow, "models": ["a-*"]},
        {"name": "operator", "token": digest_of(OPERATOR), "allow": allow},
    ]
    (folder / "rules.json").write_text(json.dumps({"caller": rules}))
    running = serving(
        folder,
        folder / "models",
        load_model=("theirs",),
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
    )
    async with running as server:
        server.application.capacity.limit({"cpu:0": 1})
        yield Place(server)


async def over_grpc(place: Place, token: str) -> str:
    async with triton.InferenceServerClient(place.server.url) as client:
        try:
            await client.load_model("a-new", headers={"authorization": f"Bearer {token}"})
        except InferenceServerException as error:
            return str(error.message())
    return ""


LOADS: Mapping[str, Callable[[Place, str], Awaitable[str]]] = {
    "V2 REST": lambda place, token: place.rest("/v2/repository/models/a-new/load", token),
    "V2 gRPC": over_grpc,
}


@pytest.mark.parametrize("door", LOADS)
async def test_only_who_sees_all_is_told_what_a_device_has(place: Place, door: str) -> None:
    """The index hides it from others as well, whoever started the last load."""
    told = [await LOADS[door](place, token) for token in (TENANT, OPERATOR)]
    kept = [await place.rest("/v2/repository/index", token) for token in (TENANT, OPERATOR, TENANT)]

    assert all("out of memory, failed to load it: it needs " in text for text in told), told
    assert [", more than is free" in text for text in told] == [True, False]
    assert [FREE in text for text in told] == [False, True]
    assert [FREE in text for text in kept] == [False, True, False]
    assert ", more than is free" in kept[0]
