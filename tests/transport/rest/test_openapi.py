"""The OpenAPI description, compared with the route table that it is generated from."""

import inspect
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from xlaserve.app.server import Application
from xlaserve.http.dashboard.openapi import TAGS, describe, operation_id, statuses
from xlaserve.http.messages import HttpRequest, HttpResponse, json_response
from xlaserve.http.routing import Body, Header, Route
from xlaserve.net.status import STATUSES
from xlaserve.serving.call import Operation
from xlaserve.settings import Settings

OF_BODIES = {400, 408, 413, 501}
"""Statuses of failed body reads: malformed, timed out, too large, unknown coding."""

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rest.md"

Operations = dict[tuple[str, str], dict[str, Any]]


async def handler(request: HttpRequest) -> HttpResponse:
    """Return nothing."""
    return json_response({})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Route, ...]]:
    """Every route of a server."""
    application = Application(Settings.read({}, repository=tmp_path_factory.mktemp("models")))
    yield application.http_routes().routes
    application.workers.close()


@pytest.fixture(scope="module")
def description(rows: tuple[Route, ...]) -> dict[str, Any]:
    return describe(rows, version="1.2.3")


@pytest.fixture(scope="module")
def operations(description: dict[str, Any]) -> Operations:
    return {
        (method.upper(), path): operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    }


def described(*rows: Route) -> Any:
    return describe(rows, version="1")["paths"]


def test_it_is_valid(description: dict[str, Any]) -> None:
    """Against the OpenAPI 3.1 meta-schema, with all references resolved."""
    assert [] == [error.message for error in OpenAPIV31SpecValidator(description).iter_errors()]


def test_every_route_is_there_and_nothing_else(
    rows: tuple[Route, ...], operations: Operations
) -> None:
    assert {(row.method, row.path) for row in rows} == set(operations)


def test_the_page_of_the_documentation_lists_every_route(operations: Operations) -> None:
    listed = re.findall(r"^\| `([A-Z]+)` \| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)

    assert sorted(operations) == sorted(listed)


def test_every_handler_is_the_handler_of_a_route(rows: tuple[Route, ...]) -> None:
    owners = {type(row.handle.__self__) for row in rows if inspect.ismethod(row.handle)}
    handlers = {
        method
        for owner in owners
        for _, method in inspect.getmembers(owner, inspect.iscoroutinefunction)
        if list(inspect.signature(method).parameters) == ["self", "request"]
        and not method.__name__.startswith("_")
    }

    assert handlers
    assert handlers == {row.handle.__func__ for row in rows if inspect.ismethod(row.handle)}


def test_every_name_in_a_path_is_a_parameter_with_an_example(operations: Operations) -> None:
    for (_, path), operation in operations.items():
        parameters = [p for p in operation["parameters"] if p["in"] == "path"]

        assert all(parameter["example"] for parameter in parameters)
        assert re.findall(r"{(\w+)}", path) == [parameter["name"] for parameter in parameters]


def test_operations_have_names_of_their_own_and_words(
    rows: tuple[Route, ...], operations: Operations
) -> None:
    assert len(rows) == len({operation_id(row) for row in rows})
    assert all(operation["description"].endswith(".") for operation in operations.values())


def test_every_group_is_explained(rows: tuple[Route, ...], description: dict[str, Any]) -> None:
    assert {row.tag for row in rows} <= set(TAGS)
    assert {row.tag for row in rows} == {tag["name"] for tag in description["tags"]}


def test_every_status_is_one_of_the_table_of_errors(rows: tuple[Route, ...]) -> None:
    known = {int(status.http) for status in STATUSES.values()}

    assert set() == {status for row in rows for status in statuses(row)} - known


def test_who_reads_a_body_can_refuse_it(rows: tuple[Route, ...]) -> None:
    for row in rows:
        if row.takes is not None:
            assert set(row.errors) >= OF_BODIES, (row.method, row.path)


def test_who_changes_something_can_refuse_other_sites(operations: Operations) -> None:
    refusing = {key for key, operation in operations.items() if "403" in operation["responses"]}

    assert {key for key in operations if key[0] != "GET"} == refusing


def test_every_operation_can_fail_as_an_error(operations: Operations) -> None:
    """Paths of the OpenAI API use its error format."""
    error = {"$ref": "#/components/responses/Error"}
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    for (_, path), operation in operations.items():
        found = operation["responses"]["500"]
        if path.startswith(("/v1/", "/openai/v1/")):
            assert schema == found["content"]["application/json"]["schema"]
        else:
            assert error == found


def test_a_status_may_carry_an_answer_and_an_error() -> None:
    """A model that is not ready gives a 400 with a body, an invalid name a 400 with an error."""
    row = Route(
        "GET",
        "/x",
        Operation.PAGE,
        handler,
        "X",
        "server",
        Body(int),
        errors=(400,),
        other={400: "No."},
    )
    schema = described(row)["/x"]["get"]["responses"]["400"]["content"]["application/json"]

    assert [{"type": "integer"}, {"$ref": "#/components/schemas/Error"}] == schema["schema"][
        "anyOf"
    ]


def test_headers_stand_with_the_request_and_the_answer() -> None:
    body = Body(int, headers=(Header("X-Length", int, "How long."),))
    operation = described(
        Route("POST", "/x", Operation.PAGE, handler, "X", "server", body, takes=body)
    )
    operation = operation["/x"]["post"]

    assert ["X-Length"] == [p["name"] for p in operation["parameters"] if p["in"] == "header"]
    assert {"type": "integer"} == operation["responses"]["200"]["headers"]["X-Length"]["schema"]


def test_what_is_not_json_has_no_schema() -> None:
    row = Route(
        "GET",
        "/x",
        Operation.PAGE,
        handler,
        "X",
        "server",
        Body(int, ("application/octet-stream",)),
    )

    assert {"application/octet-stream": {}} == (
        described(row)["/x"]["get"]["responses"][str(int(HTTPStatus.OK))]["content"]
    )


def test_a_body_may_be_left_out_where_the_row_says_so() -> None:
    row = Route(
        "POST",
        "/x",
        Operation.PAGE,
        handler,
        "X",
        "server",
        takes=Body(int, required=False, example=3),
    )
    body = described(row)["/x"]["post"]["requestBody"]

    assert not body["required"]
    assert 3 == body["content"]["application/json"]["example"]
