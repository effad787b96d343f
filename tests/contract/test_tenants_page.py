"""The status page's data for a restricted caller: its own models only."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support import identity_models
from support.http import Answer, connect, message
from support.server import RunningServer, serving

from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.settings.choices import ModelControlMode

TENANT, OPERATOR, PAGE_ALONE, BOTH = (new_token() for _ in range(4))
OWN, OTHER, ABSENT = "a-one", "b-one", "b-non"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tenants")
    for name in (OWN, OTHER):
        identity_models.write(folder / "models", name, "FP32")
    rules = {
        "caller": [
            {
                "name": "a",
                "token": digest_of(TENANT),
                "allow": ["infer", "metadata", "page"],
                "models": "a-*",
            },
            {
                "name": "operator",
                "token": digest_of(OPERATOR),
                "allow": ["infer", "metadata", "page", "manage"],
            },
            {"name": "p", "token": digest_of(PAGE_ALONE), "allow": ["page"], "models": "a-*"},
            {"name": "q", "token": digest_of(BOTH), "allow": ["page"], "models": "a-*"},
            {"name": "q-all", "token": digest_of(BOTH), "allow": ["metadata"]},
        ]
    }
    (folder / "rules.json").write_text(json.dumps(rules))
    running = serving(
        folder,
        folder / "models",
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
        model_control_mode=ModelControlMode.EXPLICIT,
    )
    async with running as server:
        for name in (OWN, OTHER):
            load = f"/v2/repository/models/{name}/load"
            assert 200 == (await ask(server, "POST", load, OPERATOR)).status
            infer = f"/v2/models/{name}/infer"
            for token in (OPERATOR, TENANT):
                await ask(server, "POST", infer, token, BODY)
        # A failure reported to its client, which no other caller may see.
        await ask(server, "POST", f"/v2/models/{OWN}/infer", OPERATOR, {"inputs": []})
        yield server


async def ask(
    server: RunningServer, method: str, path: str, token: str, body: Any = None
) -> Answer:
    assert server.http is not None
    data = b"" if body is None else json.dumps(body).encode()
    async with connect(server.http) as client:
        return await client.ask(
            message(method, path, ("authorization", f"Bearer {token}"), body=data)
        )


async def test_the_status_has_its_models_and_their_sums(server: RunningServer) -> None:
    own, all_of_them = [
        json.loads((await ask(server, "GET", "/status.json", token)).body)
        for token in (TENANT, OPERATOR)
    ]

    assert [OWN] == [row["name"] for row in own["models"]]
    assert not own["server"]["controllable"]
    assert (1, 1, 1) == (own["ready_models"], own["model_count"], own["matching"])
    assert own["models"][0]["size_bytes"] == own["memory"]["used_bytes"]
    assert own["memory"]["total_bytes"] is None
    # One inference per caller; the operator's failed one counts for the model as well.
    assert (2, 1) == (own["requests"]["success"], own["requests"]["fail"])
    assert [OWN, OTHER] == [row["name"] for row in all_of_them["models"]]
    assert 3 == all_of_them["requests"]["success"]


async def test_the_page_of_its_model_names_no_other_caller(server: RunningServer) -> None:
    own, operators = [
        json.loads((await ask(server, "GET", f"/page/models/{OWN}", token)).body)
        for token in (TENANT, OPERATOR)
    ]

    assert "operator" == operators["versions"][0]["origin"]["asker"]["principal"]
    assert "asker" not in own["versions"][0]["origin"]
    assert [""] == [error["text"] for error in own["errors"]]
    assert operators["errors"][0]["text"] not in json.dumps(own)


async def test_another_model_is_answered_as_one_that_is_nowhere(server: RunningServer) -> None:
    hidden, absent = [
        await ask(server, "GET", f"/page/models/{name}", TENANT) for name in (OTHER, ABSENT)
    ]

    assert 404 == hidden.status
    assert hidden.body.replace(OTHER.encode(), b"") == absent.body.replace(ABSENT.encode(), b"")


@pytest.mark.parametrize("path", ["/history.json", "/page/hosting"])
async def test_what_is_of_the_whole_server_shows_its_models_alone(
    server: RunningServer, path: str
) -> None:
    answer = await ask(server, "GET", path, TENANT)

    assert 200 == answer.status
    assert OTHER.encode() not in answer.body
    assert OTHER.encode() in (await ask(server, "GET", path, OPERATOR)).body


async def test_events_are_those_of_its_models(server: RunningServer) -> None:
    answer = json.loads((await ask(server, "GET", "/page/events", TENANT)).body)

    assert {OWN} == {event["model"] for event in answer["events"]}


@pytest.mark.parametrize("token", [PAGE_ALONE, BOTH], ids=["page", "metadata of all"])
@pytest.mark.parametrize(
    "path", ["/status.json", "/history.json", "/page/events", f"/page/models/{OWN}"]
)
async def test_a_page_of_some_models_shows_these_whatever_else_its_caller_may(
    server: RunningServer, path: str, token: str
) -> None:
    answer = await ask(server, "GET", path, token)

    assert 200 == answer.status
    assert OWN.encode() in answer.body
    assert OTHER.encode() not in answer.body


async def test_what_a_caller_of_some_models_reads_replaces_no_answer_of_all(
    server: RunningServer,
) -> None:
    """A search by a restricted caller only changes its own rows."""
    searched, whole = [
        json.loads((await ask(server, "GET", path, TENANT)).body)
        for path in ("/status.json?search=nothing", "/status.json")
    ]

    assert ([], 0) == (searched["models"], searched["matching"])
    for name in ("memory", "requests", "ready_models", "model_count"):
        assert whole[name] == searched[name]
