"""Every RPC and route by four callers: which are allowed, denied, or see no such object.

Models named `a-` belong to tenant a; nonexistent models have names of the same length. A hidden
name must be answered byte for byte like an unknown one, and neither may be looked up.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import shared_memory
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from support import identity_models, tiny_embedding
from support.doors import HTTP, NOTHING_BEHIND, OPERATIONS, ROUTES, Asking, Seen, cells, rules
from support.server import RunningServer, serving
from tritonclient.grpc import service_pb2 as pb

from xlaserve.errors.access import Unauthenticated
from xlaserve.residence.catalog import Catalog
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.repository import Repository
from xlaserve.serving.access.objects import DOORS, RULES, Access, Doors, Rule
from xlaserve.serving.access.tokens import new_token

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, B, OPERATOR = new_token(), new_token(), new_token()
CALLERS = {"nobody": "", "owner": A, "other": B, "operator": OPERATOR}
"""By the columns of the table of objects."""
ONE, WORDS = "a-one", "a-words"
MODELS = (ONE, WORDS, "b-one")
REGION = "region-1"
ABSENT = {ONE: "a-non", WORDS: "a-wordz", REGION: "region-0"}
REFUSALS = ("401", "403", "16", "7")
UNAUTHENTICATED, PERMISSION_DENIED, NOT_FOUND, UNIMPLEMENTED = "16", "7", "5", "12"
OTHERWISE: dict[str, str] = {
    **NOTHING_BEHIND,
    # An embedding model cannot complete; only callers that may see it are told so.
    "POST /v1/completions": "400",
    "POST /v1/chat/completions": "400",
    "POST /v1/responses": "400",
    "POST /openai/v1/responses": "400",
    "POST /openai/v1/completions": "400",
    "POST /openai/v1/chat/completions": "400",
}
"""Statuses other than success that show that a caller was admitted."""
CELLS = [
    pytest.param(row, door, protocol, id=f"{row.deed} {row.thing} {door} {protocol}")
    for row, door, protocol in cells()
]


@dataclass(frozen=True)
class Place(Asking):
    """The server under test; `server` gives access to its internals."""

    server: RunningServer | None = None

    @property
    def registry(self) -> Registry:
        assert self.server is not None
        return self.server.application.registry

    async def prepare(self, door: str) -> None:
        """Reload every model and restore the region that a route needs."""
        for name in MODELS:
            if not self.registry.ready(name):
                path = f"/v2/repository/models/{name}/load"
                assert 200 == (await self.send("POST", path, OPERATOR, b"{}")).status
        if "sharedmemory" in door.lower():
            path = f"/v2/systemsharedmemory/region/{REGION}"
            await self.send("POST", f"{path}/unregister", OPERATOR, b"{}")
            if not door.lower().endswith("memoryregister") and not door.endswith("/register"):
                body = json.dumps(self.region).encode()
                assert 200 == (await self.send("POST", f"{path}/register", OPERATOR, body)).status


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("doors")
    models = folder / "models"
    for name in (ONE, "b-one"):
        identity_models.write(models, name, "FP32")
    tiny_embedding.export(models / WORDS, dimensions=[2, 4], pad=7)
    (folder / "rules.json").write_text(rules(OPERATOR, {"a": A, "b": B}))
    running = serving(
        folder,
        models,
        http_endpoint="port:0",
        modelmesh=True,
        shared_memory="all",
        default_model=ONE,
        cors_origin=("https://app.example",),  # gRPC-Web is off without it
        trace_file=str(folder / "traces"),
        access_rules=str(folder / "rules.json"),
    )
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        async with running as server:
            assert server.http is not None
            yield Place(server.url, server.http, memory.name, ONE, models, server=server)
    finally:
        memory.close()
        memory.unlink()


# --- Completeness of the table -------------------------------------------------------------------


async def test_every_door_of_the_server_is_in_the_table() -> None:
    """With the required operation; and no row names a route that does not exist."""
    rows = [(row, path) for row in DOORS for path in row.paths]
    found = {
        door: {row.operation for row, path in rows if fnmatchcase(door, path.replace("[", "[[]"))}
        for door in OPERATIONS
    }
    unused = [path for _, path in rows if not any(fnmatchcase(d, path) for d in OPERATIONS)]

    assert {door: {operation} for door, operation in OPERATIONS.items()} == found
    assert [] == unused


async def test_every_rule_has_a_row() -> None:
    assert set(Rule) == set(RULES) == {row.rule for row in DOORS}


# --- Every cell ----------------------------------------------------------------------------------


def name_for(door: str) -> str:
    if "haredmemory" in door.lower():
        return REGION
    return WORDS if "/v1/" in door else ONE


@contextmanager
def looked_up(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[str]]:
    """Record which of the names are looked up in the registry, the catalog, or on disk."""
    found: list[str] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, name: str, *more: Any, **named: Any) -> Any:
            if name in names:
                found.append(name)
            return call(self, name, *more, **named)

        return noted

    with monkeypatch.context() as patch:
        for owner, method in (
            (Registry, "resolve"),
            (Registry, "find"),
            (Repository, "find"),
            (Repository, "holds"),
            (Catalog, "could_load"),
        ):
            patch.setattr(owner, method, noting(getattr(owner, method)))
        yield found


@pytest.mark.parametrize(("row", "door", "protocol"), CELLS)
async def test_a_door_is_open_to_whom_the_table_says(
    place: Place, monkeypatch: pytest.MonkeyPatch, row: Doors, door: str, protocol: str
) -> None:
    name = name_for(door)
    for caller, token in CALLERS.items():
        wanted: Access = getattr(RULES[row.rule], caller)
        await place.prepare(door)
        if wanted is not Access.NOT_THERE:
            seen = await place.ask(row, door, protocol, token, name)
            CHECKS[wanted](seen, caller, row, door)
            continue
        absent = ABSENT[name]
        with looked_up(monkeypatch, name, absent) as found:
            hidden = await place.ask(row, door, protocol, token, name)
            unknown = await place.ask(row, door, protocol, token, absent)
        assert hidden.without(name) == unknown.without(absent), caller
        assert [] == found
        assert hidden.status not in REFUSALS
        if row.rule is Rule.OF_A_MODEL:
            assert place.registry.ready(name), "somebody else has changed it"
        elif "{region}" not in door and protocol == HTTP:
            assert name.encode() not in hidden.data


def is_unknown(seen: Seen, caller: str, row: Doors, door: str) -> None:
    assert seen.status in ("401", UNAUTHENTICATED), seen
    assert str(Unauthenticated()) in seen.text + seen.data.decode()


def is_refused(seen: Seen, caller: str, row: Doors, door: str) -> None:
    assert seen.status in ("403", PERMISSION_DENIED), seen


def works(seen: Seen, caller: str, row: Doors, door: str) -> None:
    assert seen.status == OTHERWISE.get(door, "200" if " " in door else "0"), (caller, seen)
    if row.rule is Rule.LIST and "/v1/" not in door:
        assert b"a-one" in seen.data
        assert b"b-one" in seen.data
    if row.rule is Rule.OF_A_CALLER and "cuda" not in door.lower():
        assert REGION.encode() in seen.data
    if door.endswith("StreamInfer"):
        assert not pb.ModelStreamInferResponse.FromString(seen.data[5:]).error_message
    if door.endswith(("Health/Check", "Health/Watch")):
        answer = health_pb2.HealthCheckResponse.FromString(seen.data[5:])
        assert health_pb2.HealthCheckResponse.SERVING == answer.status


def has_its_own(seen: Seen, caller: str, row: Doors, door: str) -> None:
    own, other = (b"a-", b"b-") if caller == "owner" else (b"b-", b"a-")
    assert seen.status in ("200", "0"), (caller, seen)
    assert other not in seen.data, (caller, seen)
    # Tenant b has no encoder model.
    assert own in seen.data or (own == b"b-" and "/v1/" in door), (caller, seen)


CHECKS: dict[Access, Callable[[Seen, str, Doors, str], None]] = {
    Access.UNKNOWN: is_unknown,
    Access.REFUSED: is_refused,
    Access.WORKS: works,
    Access.ITS_OWN: has_its_own,
}


# --- HTTP methods that have no row ---------------------------------------------------------------


async def test_head_is_what_get_is(place: Place) -> None:
    """For each route and caller: the same status, without a body."""
    names = {"model": ONE, "version": "1", "repository": "r", "region": REGION}
    found, wanted = {}, {}
    for door in ROUTES:
        method, _, path = door.partition(" ")
        if method == "GET":
            for caller, token in CALLERS.items():
                at = path.format_map(names | ({"model": WORDS} if "/v1/" in path else {}))
                found[door, caller] = (await place.send("HEAD", at, token)).status
                wanted[door, caller] = (await place.send("GET", at, token)).status

    assert wanted == found
    assert {200, 401, 403, 404} == set(wanted.values())


@pytest.mark.parametrize("method", ["OPTIONS", "PATCH", "PUT", "DELETE"])
async def test_a_method_that_a_path_has_not_tells_no_model(
    place: Place, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    found = []
    paths = {p for m, _, p in (door.partition(" ") for door in ROUTES) if "{model}" in p}
    with looked_up(monkeypatch, ONE, ABSENT[ONE]) as asked:
        for path in sorted(paths - {"/models/{model}"}):
            at = [path.format(model=n, version=1, repository="r") for n in (ONE, ABSENT[ONE])]
            both = [await place.send(method, one, B) for one in at]
            found.append([(one.status, one.headers.get("allow")) for one in both])

    assert all(hidden == absent for hidden, absent in found)
    assert [] == asked


# --- Alternative spellings of names --------------------------------------------------------------

ODD = [
    "A-one",
    "a-one ",
    " a-one",
    "a-one%00",
    "b-../a-one",
    "b-%2F..%2Fa-one",
    "b-%252F..%252Fa-one",
    "b-\\..\\a-one",
    "b-/../../models/a-one",
    "./a-one",
    "\uff41-one",
    "a\u2010one",
    "b-*",
    "[a]-one",
    "?-one",
    "",
]


@pytest.mark.parametrize("name", ODD, ids=repr)
async def test_no_other_spelling_of_a_name_reaches_the_model(place: Place, name: str) -> None:
    """Tenant b may not see it at all; the operator only by its exact name."""
    await place.prepare("")
    used = place.registry.resolve(ONE)[0].statistics
    before = used.totals().inference_count
    quoted = quote(name, safe="%")
    statuses = set()
    for token in (B, OPERATOR):
        row, door = next((r, d) for r in DOORS for d in r.paths if d.endswith("/ModelInfer"))
        statuses.add((await place.over_grpc(row, door, token, name)).status)
        for path, body in (
            (f"/v2/models/{quoted}/infer", place.json("/infer", name)),
            (f"/v2/repository/models/{quoted}/load", {}),
            (f"/v2/repository/models/{quoted}/unload", {}),
        ):
            answer = await place.send("POST", path, token, json.dumps(body).encode())
            statuses.add(str(answer.status))
        assert before == used.totals().inference_count
        assert place.registry.ready(ONE)

    assert not statuses & {"0", "200", "500", "13"}
