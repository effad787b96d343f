"""Two concurrent tenants on every route: neither learns anything about the other.

Requests are generated from the server's tables, so a new route is tested as well, and fails if it
has no row in the table of objects (`test_doors.py`).
"""

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from support import identity_models, python_models, scripted_language, tiny_embedding
from support.doors import HTTP, NOTHING_BEHIND, OPERATIONS, Asking, Seen, cells, rules
from support.server import serving
from support.tls import trusting, write_certificate

from xlaserve.serving.access.objects import RULES, Access, Doors, Rule
from xlaserve.serving.access.tokens import new_token
from xlaserve.serving.call import Operation
from xlaserve.settings.choices import V2Dialect

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPERATOR = new_token()
CELLS = list(cells())
REFUSING = """
class Model(PythonModel):
    def infer(self, inputs):
        raise InferenceError("{name} keeps this to itself")
"""


@dataclass(frozen=True)
class Tenant:
    """A tenant, and everything that could reveal it to the other one."""

    name: str
    version: str
    value: float
    token: str

    def model(self, kind: str) -> str:
        return f"{self.name}-{kind}"

    @property
    def marks(self) -> tuple[bytes, ...]:
        """Return what must not reach another tenant: names, ids, versions, contents."""
        number = str(self.value).encode()
        return self.name.encode(), self.version.encode(), number, struct.pack("<f", self.value)

    def shows_in(self, seen: Seen) -> list[bytes]:
        """Return the marks that appear in an answer."""
        told = seen.text.encode().lower() + seen.data.lower()
        return [mark for mark in self.marks if mark.lower() in told]


ZORGO = Tenant("zorgo", "470947119", 94709.25, new_token())
GAMMA = Tenant("gamma", "582158337", 58215.75, new_token())
TENANTS = (ZORGO, GAMMA)
OTHER = {ZORGO: GAMMA, GAMMA: ZORGO}


def write(root: Path) -> None:
    """Write the models of both, of the same kinds, and one that both can see."""
    for tenant in TENANTS:
        for kind in ("one", "spare"):
            identity_models.write(root, tenant.model(kind), "FP32")
        for kind in ("one", "spare"):
            (root / tenant.model(kind) / "1").rename(root / tenant.model(kind) / tenant.version)
        tiny_embedding.export(root / tenant.model("words"))
        says = [f"{tenant.name} says"]
        scripted_language.export(root / tenant.model("story"), says, scripted_language.HERMES)
        code = REFUSING.format(name=tenant.name)
        python_models.write(root, tenant.model("refuses"), code, python_models.VECTORS)
        _write_mix(root, tenant)
    identity_models.write(root, "shared", "FP32")


def _write_mix(root: Path, tenant: Tenant) -> None:
    """Write an ensemble with a step of the other tenant."""
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    step = {
        "model_name": OTHER[tenant].model("one"),
        "model_version": -1,
        "input_map": {"x": "x"},
        "output_map": {"y": "y"},
    }
    config = {
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {"step": [step]},
    }
    (root / tenant.model("mix") / "1").mkdir(parents=True)
    (root / tenant.model("mix") / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Place:
    asking: Asking

    def client(self, tenant: Tenant) -> Asking:
        id, version = f"{tenant.name}-request", tenant.version
        return replace(self.asking, id=id, version=version, value=tenant.value)

    async def ask(self, tenant: Tenant, row: Doors, door: str, protocol: str, name: str) -> Seen:
        return await self.client(tenant).ask(row, door, protocol, tenant.token, name)

    async def change(self, tenant: Tenant, verb: str, name: str, token: str = "") -> None:
        path = f"/v2/repository/models/{name}/{verb}"
        answer = await self.asking.send("POST", path, token or tenant.token, b"{}")
        assert 200 == answer.status, answer


FORMS: Mapping[str, dict[str, Any]] = {
    "triton": {},
    "mlserver, TLS": {"v2_dialect": V2Dialect.MLSERVER, "tls": True},
    "kserve": {"v2_dialect": V2Dialect.KSERVE},
}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    name="place",
    params=[
        pytest.param(form, marks=[pytest.mark.slow] if form == "kserve" else []) for form in FORMS
    ],
)
async def _place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, programs: str
) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("tenants")
    models = folder / "models"
    await asyncio.to_thread(write, models)
    tokens = {tenant.name: tenant.token for tenant in TENANTS}
    (folder / "rules.json").write_text(rules(OPERATOR, tokens, "shared", pages=True))
    settings: dict[str, Any] = dict(FORMS[request.param])
    tls = None
    if settings.pop("tls", False):
        authority = trustme.CA()
        settings |= write_certificate(authority, folder)
        tls = trusting(authority), trusting(authority)
        tls[1].set_alpn_protocols(["http/1.1"])
    running = serving(
        folder,
        models,
        http_endpoint="port:0",
        modelmesh=True,
        shared_memory="all",
        allow_python_models=True,
        cors_origin=("https://app.example",),  # gRPC-Web is off without it
        trace_file=str(folder / "traces"),
        access_rules=str(folder / "rules.json"),
        compilation_cache_directory=programs,
        **settings,
    )
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        async with running as server:
            assert server.http is not None
            asking = Asking(server.url, server.http, memory.name, "shared", models, tls=tls)
            for tenant in TENANTS:
                path = f"/v2/systemsharedmemory/region/{tenant.name}-region/register"
                body = json.dumps(asking.region).encode()
                assert 200 == (await asking.send("POST", path, OPERATOR, body)).status
            place = Place(asking)
            # Load the steps before their ensemble: a tenant may not load the other's.
            for name in sorted((path.name for path in models.iterdir()), key=_is_mix):
                await place.change(ZORGO, "load", name, OPERATOR)
            yield place
    finally:
        memory.close()
        memory.unlink()


def _is_mix(name: str) -> bool:
    return name.endswith("mix")


def kind_for(row: Doors, door: str) -> str:
    """Return the kind of tenant object to test a route with."""
    if "haredmemory" in door.lower():
        return "region"
    if row.deed == "load or unload":
        return "spare"
    if "/v1/" in door:
        return "words" if "embeddings" in door else "story"
    return "one"


def may(row: Doors) -> Access:
    """Return what a tenant finds at a route; it may read pages, too."""
    return Access.WORKS if row.operation is Operation.PAGE else RULES[row.rule].owner


def expected(row: Doors, door: str) -> tuple[str, ...]:
    """Return the expected statuses for a tenant's own object; empty if any will do."""
    found = may(row)
    if found is Access.REFUSED:
        return ("403",) if " " in door else ("7",)
    if row.rule is Rule.ONLY_ONE or found is Access.NOT_THERE:
        return ()
    return (NOTHING_BEHIND.get(door, "200" if " " in door else "0"),)


def unknown(name: str) -> str:
    """Return a name of the same length that does not exist and is hidden from the same callers."""
    return "nobody"[: name.index("-")] + name[name.index("-") :]


async def visit(place: Place, tenant: Tenant, seed: int) -> dict[str, int]:
    """Call every route in a random order; return the inferences of each model."""
    inferred: dict[str, int] = {}
    order = random.Random(seed).sample(CELLS, len(CELLS))
    for row, door, protocol in order:
        kind = kind_for(row, door)
        own, hidden = tenant.model(kind), OTHER[tenant].model(kind)
        if kind == "spare":
            await place.change(tenant, "load", own)
        seen = await place.ask(tenant, row, door, protocol, own)
        wanted = expected(row, door)
        assert not wanted or seen.status in wanted, (door, protocol, seen)
        assert [] == OTHER[tenant].shows_in(seen), (door, protocol, seen)
        if row.deed == "infer" and seen.status in ("0", "200"):
            inferred[own] = inferred.get(own, 0) + 1
        if may(row) is Access.REFUSED or not is_named(row, door, protocol):
            continue
        absent = unknown(hidden)
        one = await place.ask(tenant, row, door, protocol, hidden)
        other = await place.ask(tenant, row, door, protocol, absent)
        assert one.without(hidden) == other.without(absent), (door, protocol)
        assert [] == OTHER[tenant].shows_in(one.without(hidden)), (door, protocol, one)
    return inferred


def is_named(row: Doors, door: str, protocol: str) -> bool:
    """Return whether requests to a route name a single object."""
    return row.rule is Rule.OF_A_MODEL or "{model}" in door or "{region}" in door


async def test_every_door_is_visited() -> None:
    assert set(OPERATIONS) == {door for _, door, _ in CELLS}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_two_tenants_at_once_show_each_other_nothing(place: Place, seed: int) -> None:
    """No answer contains the other's data, or distinguishes its objects from nonexistent ones."""
    before = [await statistics(place, tenant) for tenant in TENANTS]
    async with asyncio.TaskGroup() as both:
        visits = [
            both.create_task(visit(place, tenant, seed + 10 * at))
            for at, tenant in enumerate(TENANTS)
        ]
    inferred = [each.result() for each in visits]
    for tenant, counts, was in zip(TENANTS, inferred, before, strict=True):
        found = await statistics(place, tenant)
        one = tenant.model("one")
        assert counts[one] > 10
        assert counts[one] == found[one] - was[one]


async def statistics(place: Place, tenant: Tenant) -> dict[str, int]:
    """Return the number of inferences of each of the tenant's models."""
    answer = await place.asking.send("GET", "/v2/models/stats", tenant.token)
    return {one["name"]: one["inference_count"] for one in answer.json["model_stats"]}


# --- Counters and times --------------------------------------------------------------------------

LOOKS = [
    cell
    for cell in CELLS
    if cell[0].operation in (Operation.METADATA, Operation.PAGE, Operation.READINESS)
    or cell[0].rule is Rule.LIST
]
"""Read-only routes that show counters, states, and times."""
TIMES = ("uptime_seconds", "now_seconds", "at_seconds", "seconds", "lag_mean_seconds")
MOVING = (*TIMES, "errors", "recent", "hour")
"""Global times, errors (which reading itself may cause), and time series."""


def still(value: Any) -> Any:
    """Return JSON without values that change by themselves, and without time series.

    A series has the server's busiest versions, so which of a caller's own it includes depends
    on all tenants.
    """
    if isinstance(value, dict):
        kept = {key: still(each) for key, each in value.items() if key not in MOVING}
        return {key: each for key, each in kept.items() if not key.startswith("lag_")}
    return [still(each) for each in value] if isinstance(value, list) else value


def differences(at: Any, one: Any, other: Any) -> list[tuple[Any, Any, Any]]:
    """Return where and how two readings differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences((at, key), one[key], other[key])]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for n, pair in pairs for found in differences((at, n), *pair)]
    return [] if one == other else [(at, one, other)]


async def look(place: Place, tenant: Tenant) -> dict[tuple[str, str, str], Any]:
    """Return everything that a tenant can read."""
    found = {}
    for row, door, protocol in LOOKS:
        if may(row) is Access.REFUSED:
            continue
        kinds = ("mix",) if door.endswith("/ready") else ("one", "mix", "story")
        for kind in kinds if is_named(row, door, protocol) else ("one",):
            seen = await place.ask(tenant, row, door, protocol, tenant.model(kind))
            is_json = protocol == HTTP and seen.data[:1] in (b"{", b"[")
            body = still(json.loads(seen.data)) if is_json else seen.data
            found[door, protocol, kind] = seen.status, body
    return found


async def errors(place: Place, tenant: Tenant) -> Any:
    """Return the failed requests of one of its models, to which reading never adds."""
    path = f"/page/models/{tenant.model('one')}"
    return (await place.asking.send("GET", path, tenant.token)).json["errors"]


async def test_what_one_tenant_does_changes_nothing_that_the_other_reads(place: Place) -> None:
    """Inferences, failures, loads and unloads change no counter, size, time or event."""
    await place.change(GAMMA, "load", GAMMA.model("spare"))
    before, failed = await look(place, ZORGO), await errors(place, ZORGO)
    client = place.client(GAMMA)
    for name in ("one", "refuses", "nothing"):
        for _ in range(3):
            body = json.dumps(client.json("/infer", "")).encode()
            path = f"/v2/models/{GAMMA.model(name)}/infer"
            await client.send("POST", path, GAMMA.token, body)
    body = json.dumps(client.json("/infer", "")).encode()
    await client.send("POST", f"/v2/models/{ZORGO.model('one')}/infer", GAMMA.token, body)
    await place.change(GAMMA, "unload", GAMMA.model("spare"))
    await place.change(GAMMA, "load", GAMMA.model("story"))
    failed_then, after = await errors(place, ZORGO), await look(place, ZORGO)

    assert before.keys() == after.keys()
    assert failed == failed_then
    changed = [one for key in before for one in differences(key, before[key], after[key])]
    assert [] == changed, changed[:20]


async def test_a_step_of_the_other_is_told_without_its_name(place: Place) -> None:
    """When it is not ready, and when it fails: in states, messages, events and pages."""
    mix, step = ZORGO.model("mix"), GAMMA.model("one")
    await place.change(GAMMA, "unload", step)
    try:
        for row, door, protocol in CELLS:
            if is_named(row, door, protocol) and kind_for(row, door) in ("one", "spare"):
                seen = await place.ask(ZORGO, row, door, protocol, mix)
                assert [] == GAMMA.shows_in(seen), (door, protocol, seen)
        for row, door, protocol in LOOKS:
            seen = await place.ask(ZORGO, row, door, protocol, mix)
            assert [] == GAMMA.shows_in(seen), (door, protocol, seen)
    finally:
        await place.change(GAMMA, "load", step)
        await place.change(ZORGO, "load", mix, OPERATOR)
