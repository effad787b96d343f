"""Allowed hosts and origins of requests."""

from typing import Any

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.errors.access import WrongHost, WrongOrigin
from xlaserve.http.connection.origins import Origins
from xlaserve.serving.call import Peer
from xlaserve.settings import Settings

TCP, UNIX = Peer("http_endpoint", "127.0.0.1:1"), Peer("http_endpoint", "unix")
APP = "https://app.example"


def of(**settings: Any) -> Origins:
    return Origins.of(Settings.read({}, repository="/", **settings))


NAMED = (
    *("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:80", "[::1]:8000", "10.0.0.7"),
    *("[fe80::1]", "ip6-localhost", "localhost:"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("evil.example, localhost", "localhost, evil.example", "localhost@evil.example", "", " "),
    *("[::1", "::1", "[localhost]x", "127.0.0.1:80:80", "localhost:123456", "0x7f000001", "[evil]"),
)


@pytest.mark.parametrize("host", NAMED)
def test_a_name_of_this_machine_and_an_address_are_hosts(host: str) -> None:
    assert of().check({"host": host}, TCP) is None


@pytest.mark.parametrize("host", FOREIGN)
def test_any_other_name_is_refused(host: str) -> None:
    """It may be a page whose name was made to resolve to this machine (DNS rebinding)."""
    with pytest.raises(WrongHost):
        of().check({"host": host}, TCP)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"allowed_host": ["models.example"]}, "Models.example:80"),
        ({"allowed_host": ["*"]}, "evil.example"),
        ({"host": "gpu-box"}, "gpu-box:8000"),
        ({"sagemaker": True}, "anything"),
    ],
    ids=["named", "any", "listened on", "sagemaker"],
)
def test_further_hosts_follow_from_settings(settings: dict[str, Any], host: str) -> None:
    assert of(**settings).check({"host": host}, TCP) is None


def test_a_host_that_is_set_is_the_only_one_of_sagemaker() -> None:
    with pytest.raises(WrongHost):
        of(sagemaker=True, allowed_host=["models.example"]).check({"host": "anything"}, TCP)


def test_a_unix_socket_has_no_host_and_a_page_no_unix_socket() -> None:
    assert of().check({"host": "evil.example"}, UNIX) is None
    assert of().check({}, TCP) is None


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("https://127.0.0.1", "127.0.0.1:443"),
        ("http://LOCALHOST:80", "localhost"),
    ],
)
def test_a_page_of_the_server_may_ask(origin: str, host: str) -> None:
    assert of().check({"host": host, "origin": origin}, TCP) is None


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://localhost:3000", "http://localhost", "https://evil.example", ""),
        *("localhost:8000", "ftp://localhost:8000", "http://localhost:8000/"),
        "http://localhost:8000, http://localhost:8000",
    ],
)
def test_a_page_of_another_site_may_not(origin: str) -> None:
    with pytest.raises(WrongOrigin):
        of().check({"host": "localhost:8000", "origin": origin}, TCP)


def test_a_page_of_an_origin_that_is_set_may() -> None:
    asked = {"host": "localhost", "origin": APP}

    assert APP == of(cors_origin=[APP]).check(asked, TCP)
    assert APP == of(cors_origin=["*"]).check(asked, TCP)
    with pytest.raises(WrongOrigin):
        of(cors_origin=["https://app.example:8443"]).check(asked, TCP)


def test_only_pages_that_may_ask_may_read() -> None:
    origins = of(cors_origin=[APP])

    assert APP == origins.answer_headers({"origin": APP})["Access-Control-Allow-Origin"]
    assert {} == origins.answer_headers({"origin": "https://evil.example"})
    assert {} == origins.answer_headers({})
    assert {} == of().answer_headers({"origin": APP})


def test_a_preflight_is_answered_for_origins_that_are_set() -> None:
    asked = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    origins = of(cors_origin=[APP])
    answer = origins.preflight("OPTIONS", asked)

    assert answer is not None
    assert "authorization, content-type" == answer["Access-Control-Allow-Headers"]
    assert origins.preflight("GET", asked) is None
    assert origins.preflight("OPTIONS", {**asked, "origin": "https://evil.example"}) is None
    assert of().preflight("OPTIONS", asked) is None
    assert origins.preflight("OPTIONS", {"origin": APP}) is None
    odd = origins.preflight("OPTIONS", {**asked, "access-control-request-headers": "a\r\nb"})
    assert odd is not None
    assert "Access-Control-Allow-Headers" not in odd


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"allowed_host": ["a:80"]}, "setting allowed_host: expected a name without a port"),
        ({"allowed_host": ["http://a"]}, "setting allowed_host: expected a name"),
        ({"cors_origin": ["app.example"]}, "setting cors_origin: expected an origin"),
        ({"cors_origin": ["https://app.example/"]}, "setting cors_origin: expected an origin"),
    ],
)
def test_what_is_no_name_or_origin_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSettings, match=text):
        of(**settings)
