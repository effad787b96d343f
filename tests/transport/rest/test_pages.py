"""The status pages as sent: safe, self-contained, and accurate."""

import asyncio
import io
import json
import re
import zipfile
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urljoin

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from support.others import PlayedOthers

from xlaserve.concurrency.in_turns import AT_A_TIME
from xlaserve.concurrency.others import NOBODY, Others, Question
from xlaserve.grpc.methods import ROWS
from xlaserve.http.dashboard.docs_page import render
from xlaserve.http.dashboard.openapi import describe
from xlaserve.http.dashboard.pages import page_routes
from xlaserve.http.messages import HttpRequest, HttpResponse, json_response
from xlaserve.http.routing import Body, QueryParameter, Route
from xlaserve.residence.reports.monitor import StatusRow
from xlaserve.residence.reports.status_board import Reading, RequestTotals
from xlaserve.residence.server import ServerDescription
from xlaserve.serving.access.sight import Sees, everything, nothing
from xlaserve.serving.call import Call, Operation
from xlaserve.serving.statistics import REQUEST_BOUNDS_NS

PAGES = ("/", "/v2/docs")
BINARY = {"/v2/docs/protos.zip"}
MANY = 1000
PROTOS = Path(__file__).resolve().parents[3] / "protos"
OUTSIDE = {"/metrics"}
"""Linked from the pages, but served elsewhere."""
BUCKETS = (*range(len(REQUEST_BOUNDS_NS)), 1)
HOSTILE = "<script>alert(1)</script>\"'&"


async def handler(request: HttpRequest) -> HttpResponse:
    """Return nothing."""
    return json_response({})


def row(name: str, **facts: Any) -> StatusRow:
    defaults: dict[str, Any] = {
        "version": "1",
        "state": "READY",
        "reason": "",
        "size_bytes": 5,
        "compile_seconds": 1.0,
        "pending": 0,
        "success_count": 0,
        "fail_count": 0,
        "request_ns": 0,
        "request_buckets": (0,) * len(BUCKETS),
        "last_inference_ms": 0,
    }
    return StatusRow(name, **defaults | facts)


def reading(*rows: StatusRow) -> Reading:
    return Reading(
        uptime_seconds=1.5,
        ready=True,
        controllable=False,
        used_bytes=10,
        total_bytes=None,
        totals=RequestTotals(7, 1, BUCKETS),
        ready_models=1,
        model_count=2,
        matching=len(rows),
        rows=rows,
    )


def routes(
    *rows: StatusRow, asked: list[str] | None = None, others: Others = NOBODY
) -> dict[str, Route]:
    async def read(search: str) -> Reading:
        if asked is not None:
            asked.append(search)
        return reading(*rows)

    board: Any = SimpleNamespace(read=read)
    other = Route("POST", "/other", Operation.PAGE, handler, "Another route", "server")
    made = page_routes([other], board, ServerDescription(version="1.2.3"), others)
    return {row.path: row for row in made}


async def get(path: str, *rows: StatusRow, **query: str) -> HttpResponse:
    answer = await routes(*rows)[path].handle(HttpRequest(query=query))
    assert isinstance(answer, HttpResponse)
    return answer


async def text(path: str, *rows: StatusRow) -> str:
    return b"".join(bytes(part) for part in (await get(path, *rows)).parts).decode()


@pytest.mark.parametrize("path", PAGES)
async def test_whatever_a_page_loads_is_a_route(path: str) -> None:
    page = await text(path)
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    wanted = {urljoin(path, name) for name in named}

    assert wanted
    assert set() == wanted - set(routes()) - OUTSIDE


async def test_whatever_a_script_imports_is_a_route() -> None:
    made = routes()
    scripts = [path for path in made if path.endswith(".js")]
    wanted = {
        urljoin(path, name)
        for path in scripts
        for name in re.findall(r'from "([^"]+)"', await text(path))
    }

    assert wanted
    assert set() == wanted - set(made)


async def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in sorted(set(routes()) - BINARY):
        outside = {"http://www.w3.org/2000/svg", "http://localhost:8000"}

        assert set() == set(re.findall(r"https?://[^\s\"'<]+?(?=[\"'<\s]|$)", await text(path))) - (
            outside | {"https://json-schema.org/draft/2020-12/schema"}
        )


@pytest.mark.parametrize("path", PAGES)
async def test_pages_hold_no_code_and_no_style_of_their_own(path: str) -> None:
    """The content security policy forbids inline code and styles."""
    page = await text(path)

    assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|javascript:", page)


@pytest.mark.parametrize("path", sorted(routes()))
async def test_every_answer_carries_the_policy(path: str) -> None:
    headers = (await get(path)).headers
    policy = headers["Content-Security-Policy"]

    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "nosniff" == headers["X-Content-Type-Options"]
    assert "no-referrer" == headers["Referrer-Policy"]


async def test_the_status_is_that_of_all_workers_and_names_who_is_missing() -> None:
    others = PlayedOthers({"1": reading(row("m"))}, {"2": "no answer"})
    made = routes(row("m"), others=others)
    answer = await made["/status.json"].handle(HttpRequest(query={"search": "m"}))
    assert isinstance(answer, HttpResponse)
    shown = json.loads(b"".join(bytes(part) for part in answer.parts))

    assert [(Question.STATUS, {"search": "m"})] == others.asked
    assert (20, 14, {"2": "no answer"}) == (
        shown["memory"]["used_bytes"],
        shown["requests"]["success"],
        shown["missing"],
    )
    assert not shown["server"]["ready"]
    theirs = await others.answering[Question.STATUS]({"search": "m"})
    assert isinstance(theirs, Reading)
    assert ["m"] == [one.name for one in theirs.rows]


async def test_the_status_is_never_kept() -> None:
    assert "no-store" == (await get("/status.json")).headers["Cache-Control"]


async def test_a_status_that_has_not_changed_is_not_sent_again() -> None:
    """The uptime does not count as a change; a changed row does."""
    now = reading(row("m"))

    async def read(search: str) -> Reading:
        return now

    board: Any = SimpleNamespace(read=read)
    made = page_routes([], board, ServerDescription(version="1"))
    (route,) = [route for route in made if route.path == "/status.json"]

    async def ask(tag: str) -> HttpResponse:
        headers = CIMultiDictProxy(CIMultiDict({"If-None-Match": tag}))
        answer = await route.handle(HttpRequest(headers=headers))
        assert isinstance(answer, HttpResponse)
        return answer

    first = await ask("")
    now = replace(now, uptime_seconds=9.5)
    same = await ask(first.headers["ETag"])
    now = reading(row("m", pending=1))
    other = await ask(first.headers["ETag"])

    assert [200, 304, 200] == [answer.status for answer in (first, same, other)]
    assert (0, first.headers["ETag"]) == (same.size, same.headers["ETag"])
    assert first.headers["ETag"] != other.headers["ETag"]


async def test_a_status_is_written_once_for_all_who_are_shown_the_same() -> None:
    """A caller with other permissions gets a page, and a cache entry, of its own."""
    now = reading(row("m"))
    manages: Sees = everything

    async def read(search: str) -> Reading:
        return now

    def permits(call: Call | None, operation: Operation) -> Sees:
        return manages if operation is Operation.MANAGE else everything

    board: Any = SimpleNamespace(read=read)
    made = page_routes([], board, ServerDescription(version="1"), permits=permits)
    (route,) = [route for route in made if route.path == "/status.json"]

    async def ask() -> Any:
        answer = await route.handle(HttpRequest())
        assert isinstance(answer, HttpResponse)
        return answer.parts

    first, same = await ask(), await ask()
    manages = nothing
    other = await ask()
    now = reading(row("n"))
    later = await ask()

    assert first is same
    assert [b'"fixed":true' in b"".join(one) for one in (first, other, later)] == [
        *(False, True, True)
    ]
    assert b'"n"' in b"".join(later)
    assert other is not later


async def test_many_rows_are_written_in_turns_with_requests() -> None:
    rows = [row(f"m{number}") for number in range(MANY)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    status = json.loads(await text("/status.json", *rows))
    beside.cancel()

    assert [one.name for one in rows] == [model["name"] for model in status["models"]]
    assert turns >= MANY // AT_A_TIME


async def test_the_status_says_what_the_board_says() -> None:
    busy = row("busy", success_count=7, fail_count=2, pending=3, request_buckets=BUCKETS)
    status = json.loads(await text("/status.json", busy, row("idle")))

    assert {"used_bytes": 10, "total_bytes": None} == status["memory"]
    assert ["xlaserve", "1.2.3", True, False] == [
        status["server"][key] for key in ("name", "version", "ready", "controllable")
    ]
    assert {"success": 7, "fail": 1, "buckets": list(BUCKETS)} == status["requests"]
    assert list(REQUEST_BOUNDS_NS) == status["bounds_ns"]
    assert {"success": 7, "fail": 2, "buckets": list(BUCKETS)} == status["models"][0]["requests"]
    assert 3 == status["models"][0]["pending"]


async def test_models_that_the_caller_may_not_change_are_fixed() -> None:
    def permits(call: Call, operation: Operation) -> Sees:
        return (lambda model: model == "own") if operation is Operation.MANAGE else everything

    async def read(search: str) -> Reading:
        return replace(reading(row("other"), row("own")), controllable=True)

    board: Any = SimpleNamespace(read=read)
    made = page_routes([], board, ServerDescription(version="1"), permits=permits)
    (route,) = [route for route in made if route.path == "/status.json"]
    answer = await route.handle(HttpRequest())
    assert isinstance(answer, HttpResponse)
    status = json.loads(b"".join(bytes(part) for part in answer.parts))

    assert {"other": True, "own": False} == {
        model["name"]: model.get("fixed", False) for model in status["models"]
    }
    assert status["server"]["controllable"]


async def test_who_may_change_no_model_is_told_so() -> None:
    async def read(search: str) -> Reading:
        return replace(reading(row("m")), controllable=True)

    board: Any = SimpleNamespace(read=read)
    description = ServerDescription(version="1")
    made = page_routes([], board, description, permits=lambda call, operation: nothing)
    (route,) = [route for route in made if route.path == "/status.json"]
    answer = await route.handle(HttpRequest())
    assert isinstance(answer, HttpResponse)

    assert not json.loads(b"".join(map(bytes, answer.parts)))["server"]["controllable"]


async def test_models_without_requests_cost_few_bytes() -> None:
    """Most of many models are idle, and all are sent every second."""
    one = len(await text("/status.json", row("m")))
    two = len(await text("/status.json", row("m"), row("n")))

    assert 64 > two - one


async def test_the_board_is_asked_for_what_is_searched() -> None:
    asked: list[str] = []
    await routes(asked=asked)["/status.json"].handle(HttpRequest(query={"search": "a b"}))
    await routes(asked=asked)["/status.json"].handle(HttpRequest())

    assert ["a b", ""] == asked


async def test_the_description_names_the_other_routes_and_the_pages() -> None:
    described = json.loads(await text("/v2/docs/openapi.json"))

    assert {"/other", *routes()} == set(described["paths"])
    assert "1.2.3" == described["info"]["version"]


async def test_the_documentation_shows_every_operation_and_schema() -> None:
    described = json.loads(await text("/v2/docs/openapi.json"))
    shown = set(re.findall(r'<section class="\w+" id="([^"]+)"', await text("/v2/docs")))
    operations = {o["operationId"] for path in described["paths"].values() for o in path.values()}

    assert operations | {f"schema-{name}" for name in described["components"]["schemas"]} == shown


async def test_every_link_within_the_documentation_leads_somewhere() -> None:
    page = await text("/v2/docs")
    targets = set(re.findall(r'\sid="([^"]+)"', page))

    assert set() == set(re.findall(r'href="#([^"]+)"', page)) - targets


def test_the_documentation_escapes_what_it_is_told() -> None:
    hostile = Route("GET", "/x", Operation.PAGE, handler, HOSTILE, "server")
    page = render(describe([hostile], version=HOSTILE))

    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)" in page


def test_an_example_is_a_command_that_a_shell_takes() -> None:
    made = describe(
        [Route("GET", "/v2/models/{model}", Operation.PAGE, handler, "M", "server")], version="1"
    )

    assert "/v2/models/identity&#x27;" in render(made) or "/v2/models/identity'" in render(made)


def test_every_operation_has_a_form_for_its_parameters_and_its_body() -> None:
    takes = Body(None, ("application/json", "image/*"), example={"a": HOSTILE})
    query = (QueryParameter("q", str, "Q"),)
    made = describe(
        [
            Route(
                "POST",
                "/m/{model}",
                Operation.PAGE,
                handler,
                "M",
                "server",
                takes=takes,
                query=query,
            )
        ],
        version="1",
    )
    page = render(made)

    assert '<form class="try" data-method="POST" data-path="/m/{model}"' in page
    assert ["path", "query", "type", "body", "file"] == re.findall(r'data-in="(\w+)"', page)
    assert ["application/json", "image/*"] == re.findall("<option>([^<]+)<", page)
    assert "<script>" not in page
    assert json.dumps({"a": HOSTILE}, indent=2) == unescape(
        page.partition("<textarea")[2].partition(">")[2].partition("</textarea>")[0]
    )


async def test_the_documentation_has_one_heading_of_the_first_order_and_no_gap() -> None:
    levels = [int(level) for level in re.findall(r"<h(\d)", await text("/v2/docs"))]

    assert [1] == [level for level in levels if level == 1] == levels[:1]
    assert all(after <= before + 1 for before, after in pairwise(levels))


async def test_the_protos_are_those_of_the_services_with_a_call_of_each_method() -> None:
    data = b"".join(bytes(part) for part in (await get("/v2/docs/protos.zip")).parts)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    calls = files.pop("grpcurl.txt")

    assert {f"protos/{path.name}": path.read_text() for path in PROTOS.glob("*.proto")} == files
    methods = {name.removeprefix("/") for name in ROWS if "reflection" not in name}
    assert methods == set(re.findall(r" localhost:8001 (\S+/\w+)$", calls, re.MULTILINE))


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("", "localhost:8001"),
        ("port:9001", "localhost:9001"),
        ("port:0", "localhost:8001"),
        ("systemd:grpc", "localhost:8001"),
        ("unix:/run/x.sock", "-unix /run/x.sock"),
    ],
)
async def test_calls_name_the_port_of_the_settings(endpoint: str, address: str) -> None:
    board: Any = SimpleNamespace(read=None)
    made = page_routes([], board, ServerDescription(version="1"), grpc_endpoint=endpoint)
    page = next(row for row in made if row.path == "/v2/docs")
    answer = await page.handle(HttpRequest())
    assert isinstance(answer, HttpResponse)

    assert f'<span class="grpc-address">{address}</span>' in bytes(answer.parts[0]).decode()
