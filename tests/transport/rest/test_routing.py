"""The route table, including paths that try to escape it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.http.messages import HttpRequest, HttpResponse, json_response
from xlaserve.http.routing import Route, RouteTable
from xlaserve.serving.call import Operation


async def handler(request: HttpRequest) -> HttpResponse:
    return json_response({})


TABLE = RouteTable(
    Route(method, path, Operation.PAGE, handler, path, "test")
    for method, path in (
        ("GET", "/"),
        ("GET", "/v2"),
        ("GET", "/v2/models"),
        ("GET", "/v2/models/{model}"),
        ("POST", "/v2/models/{model}/infer"),
        ("POST", "/v2/models/{model}/versions/{version}/infer"),
        ("GET", "/models/{name}"),
        ("DELETE", "/models/{name}"),
    )
)


def found(method: str, path: str) -> tuple[str | None, dict[str, str]]:
    match = TABLE.find(method, path)
    return match.route.path if match.route else None, dict(match.names)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v2/models/m/infer", {"model": "m"}),
        ("/v2/models/m/infer/", {"model": "m"}),
        ("/v2/models/m/infer?x=/y", {"model": "m"}),
        ("http://host:80/v2/models/m/infer", {"model": "m"}),
        ("/v2/models/org%2Fm%20one/infer", {"model": "org/m one"}),
        ("/v2/models/%E2%82%AC/infer", {"model": "€"}),
        ("/v2/models/a+b/infer", {"model": "a+b"}),
        ("/v2/models/%2e%2e/infer", {"model": ".."}),
        ("/v2/models/../infer", {"model": ".."}),
    ],
)
def test_a_name_is_what_stands_between_two_slashes(path: str, names: dict[str, str]) -> None:
    assert ("/v2/models/{model}/infer", names) == found("POST", path)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/m/infer//..",
        "/v2/models/m/infer/..",
        "/v2/models//infer",
        "//v2/models/m/infer",
        "/v2/models/m//infer",
        "/v2/models/m/infer//",
        "/V2/models/m/infer",
        "v2",
        "",
        "*",
    ],
)
def test_a_path_is_never_resolved_into_another(path: str) -> None:
    """KServe compatible RESTful API, Inference: `//..` truncates a path there, but not here."""
    assert (None, {}) == found("POST", path)


def test_a_path_with_other_methods_names_them() -> None:
    match = TABLE.find("PATCH", "/models/x")

    assert match.route is None
    assert ["GET", "DELETE"] == list(match.allowed)


def test_head_is_answered_like_get() -> None:
    assert ("/v2", {}) == found("HEAD", "/v2")


def test_the_root_is_a_route() -> None:
    assert ("/", {}) == found("GET", "/")


@given(st.text(alphabet="/.%2fFv models{}?", max_size=40))
def test_any_path_finds_a_route_or_none(path: str) -> None:
    """No path raises, and no name is ever empty."""
    assert all(TABLE.find("GET", path).names.values())
