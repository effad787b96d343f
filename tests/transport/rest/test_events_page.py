"""The event log on the status page: who did what, and who may see it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import identity_models
from support.server import RunningServer, serving

from xlaserve.http.dashboard.events_page import MAX_EVENTS, visible
from xlaserve.serving.access.sight import everything
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.serving.observability.events import NOBODY, Asker, Event, EventKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALL, MINE, LOOKS = new_token(), new_token(), new_token()
"""Tokens of an operator, of a tenant with one model, and of a caller who may only view the page."""


def _rules(path: Path) -> Path:
    everything = ["infer", "metadata", "manage", "page"]
    callers: list[dict[str, Any]] = [
        {"name": "operator", "token": digest_of(ALL), "allow": everything},
        {
            "name": "tenant",
            "token": digest_of(MINE),
            "allow": ["metadata", "manage"],
            "models": ["mine"],
        },
        {"name": "tenant-page", "token": digest_of(MINE), "allow": ["page"]},
        {"name": "looks", "token": digest_of(LOOKS), "allow": ["page"]},
    ]
    path.write_text(json.dumps({"caller": callers}))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    for name in ("mine", "theirs"):
        identity_models.write(root, name, "FP32")
    (root / "broken" / "1").mkdir(parents=True)
    rules = _rules(tmp_path_factory.mktemp("rules") / "rules.json")
    settings: dict[str, Any] = {
        "http_endpoint": "port:0",
        "access_rules": str(rules),
        "load_model": ("theirs",),
    }
    async with serving(tmp_path_factory.mktemp("scratch"), root, **settings) as running:
        yield running


class Asking:
    """A caller with a token."""

    def __init__(self, server: RunningServer, token: str) -> None:
        self._url = f"http://{server.http}"
        self._headers = {"Authorization": f"Bearer {token}"}

    async def get(self, expected: int = 200, **query: str) -> Any:
        """Return the JSON body of the route."""
        async with aiohttp.ClientSession(headers=self._headers) as session:
            async with session.get(f"{self._url}/page/events", params=query) as answer:
                assert expected == answer.status, await answer.text()
                return await answer.json()

    async def change(self, model: str, verb: str) -> int:
        """Load or unload a model over REST."""
        url = f"{self._url}/v2/repository/models/{model}/{verb}"
        async with aiohttp.ClientSession(headers=self._headers) as session:
            async with session.post(url, json={}) as answer:
                return answer.status


async def test_events_say_what_was_done_by_whom_over_what(server: RunningServer) -> None:
    operator = Asking(server, ALL)
    await operator.change("mine", "unload")
    before = (await operator.get())["last"]
    assert 200 == await operator.change("mine", "load")
    async with triton.InferenceServerClient(server.url) as client:
        await client.unload_model("mine", headers={"authorization": f"Bearer {ALL}"})
    assert 400 <= await operator.change("broken", "load")
    assert 400 <= await operator.change("absent", "load")
    found = (await operator.get(after=str(before)))["events"]

    shown = [(one["kind"], one["model"], one.get("failed", False)) for one in reversed(found)]
    assert [
        ("load", "mine", False),
        ("unload", "mine", False),
        ("load", "broken", True),
        ("load", "absent", True),
    ] == shown
    assert {"operator"} == {one["asker"]["principal"] for one in found}
    assert ["REST", "REST", "gRPC", "REST"] == [one["asker"]["protocol"] for one in found]
    assert all(one["asker"]["peer"].startswith("127.0.0.1:") for one in found)
    assert "absent" in found[0]["text"]
    assert [before + 4, before + 3, before + 2, before + 1] == [one["number"] for one in found]


async def test_the_start_is_in_the_log_without_an_asker(server: RunningServer) -> None:
    found = (await Asking(server, ALL).get(model="theirs"))["events"][-1]

    assert "start" == found["cause"]
    assert "asker" not in found


async def test_models_that_a_caller_may_not_see_are_left_out(server: RunningServer) -> None:
    operator, tenant = Asking(server, ALL), Asking(server, MINE)
    await tenant.change("mine", "unload")
    assert 200 == await tenant.change("mine", "load")
    server.application.reloads.request()
    async with asyncio.timeout(20):
        while not (await operator.get(search="access rules"))["matching"]:
            await asyncio.sleep(0.01)
    mine, all_of_it = await tenant.get(), await operator.get(model="theirs")
    nothing = await Asking(server, LOOKS).get()

    assert {"mine"} == {one["model"] for one in mine["events"]}
    assert all_of_it["events"]
    assert [] == nothing["events"]
    assert (True, False, True) == (mine["limited"], all_of_it["limited"], nothing["limited"])


async def test_no_number_tells_a_caller_what_happened_to_other_models(
    server: RunningServer,
) -> None:
    """Event numbers have no gaps for hidden events, and `after` works as before."""
    operator, tenant = Asking(server, ALL), Asking(server, MINE)
    await tenant.change("mine", "unload")
    assert 200 == await tenant.change("mine", "load")
    before = await tenant.get()
    for _ in range(3):
        await operator.change("theirs", "unload")
        assert 200 == await operator.change("theirs", "load")
    assert before == await tenant.get()
    assert [] == (await tenant.get(after=str(before["last"])))["events"]

    await tenant.change("mine", "unload")
    later = await tenant.get(after=str(before["last"]))
    times = [one["at_ns"] // 1000 for one in before["events"]]
    assert [("unload", "mine")] == [(one["kind"], one["model"]) for one in later["events"]]
    assert later["last"] == later["events"][0]["number"] > before["last"]
    assert times == [one["number"] for one in before["events"]]
    assert 0 == before["dropped"]


async def test_events_of_one_time_have_numbers_of_their_own() -> None:
    """This holds even if the clock was set back."""
    at = [5_000_000, 5_000_400, 4_000_000, 9_000_000]
    told = [Event(EventKind.LOAD, at_ns, number, "mine") for number, at_ns in enumerate(at, 1)]

    assert [5000, 5001, 5002, 9000] == [one.number for one in visible(told, lambda model: True)]
    assert told == visible(told, everything)


async def test_a_model_is_not_named_in_the_eviction_of_another_to_who_may_not_see_it() -> None:
    event = Event(EventKind.EVICTION, 1, model="mine", for_model="theirs")
    (limited,) = visible([event], lambda model: model == "mine")

    assert ("mine", "") == (limited.model, limited.for_model)
    assert [msgspec.structs.replace(event, number=0)] == visible([event], lambda model: True)
    assert [event] == visible([event], everything)


async def test_an_event_names_neither_hidden_models_nor_other_callers() -> None:
    """The text of a failed load is filtered too; a caller who sees all models sees everything."""
    text = "failed to load 'mine', its step failed: model 'theirs' has no step 'mine', got 'theirs'"
    told = [
        Event(EventKind.LOAD, number, model="mine", failed=True, text=text, asker=asker)
        for number, asker in enumerate((Asker("me", "1.1.1.1:1", "REST"), Asker("ops", "2:2")))
    ]

    mine, of_ops = visible(told, lambda model: model == "mine", "me")

    assert told == visible(told, everything, "me")
    assert "failed to load 'mine', its step failed: model (hidden from this caller)" in mine.text
    assert "step 'mine'" in mine.text
    assert "theirs" not in mine.text
    assert (told[0].asker, NOBODY) == (mine.asker, of_ops.asker)


async def test_a_search_and_failures_alone(server: RunningServer) -> None:
    operator = Asking(server, ALL)
    await operator.change("broken", "load")
    failed = (await operator.get(failed="true", search="BROKEN"))["events"]
    none = await operator.get(search="nobody says this")

    assert failed
    assert all(one["failed"] and one["model"] == "broken" for one in failed)
    assert (0, []) == (none["matching"], none["events"])


@pytest.mark.parametrize(
    "query",
    [{"after": "x"}, {"after": "-1"}, {"after": "9" * 40}, {"failed": "maybe"}],
    ids=str,
)
async def test_a_query_that_means_nothing_is_refused_by_name(
    server: RunningServer, query: dict[str, str]
) -> None:
    answer = await Asking(server, ALL).get(400, **query)

    assert next(iter(query)) in answer["error"]


async def test_an_answer_holds_the_newest_of_many(server: RunningServer) -> None:
    notes = server.application.control._notes
    for number in range(MAX_EVENTS + 5):
        notes.loaded("many", str(number), again=False)
    answer = await Asking(server, ALL).get(model="many")

    assert MAX_EVENTS == len(answer["events"])
    assert str(MAX_EVENTS + 4) == answer["events"][0]["version"]
    assert MAX_EVENTS + 5 == answer["matching"]


async def test_the_page_of_a_model_says_who_loaded_it_and_when(server: RunningServer) -> None:
    operator = Asking(server, ALL)
    await operator.change("mine", "unload")
    assert 200 == await operator.change("mine", "load")
    async with aiohttp.ClientSession(headers=operator._headers) as session:
        async with session.get(f"{operator._url}/page/models/mine") as answer:
            told = await answer.json()

    (version,) = told["versions"]
    assert 0 < version["origin"]["at_ns"]
    assert ("operator", "REST") == (
        version["origin"]["asker"]["principal"],
        version["origin"]["asker"]["protocol"],
    )
