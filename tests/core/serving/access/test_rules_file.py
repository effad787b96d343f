"""Strict parsing of the rules file: no mistake grants access, and errors name the location."""

import json
from pathlib import Path

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.serving.access.rules import Caller, Quota, Rules, SignedTokens
from xlaserve.serving.access.rules_file import read_rules
from xlaserve.serving.access.tokens import digest_of
from xlaserve.serving.call import Operation

DIGEST = digest_of("secret")
TOML = f"""
[signed_tokens]
keys = "keys.json"
issuer = "https://issuer.example"
audience = "xlaserve"
leeway_seconds = 5

[[caller]]
name = "ci"
token = "{DIGEST}"
listener = ["grpc_endpoint", "http_endpoint"]
allow = ["infer", "manage"]
requests_per_second = 0.5
concurrent_requests = 3

[[caller]]
name = "mesh"
unix_user = [0, 1000]
tls = ["subject:commonName=mesh", "URI:spiffe://a/b"]
allow = ["runtime"]

[[caller]]
name = "people"
subject = "*"
allow = ["page"]
requests_per_second = 4
burst = 9

[[caller]]
name = "anyone"
anyone = true
allow = ["health"]
"""
RULES = Rules(
    (
        Caller(
            "ci",
            frozenset({Operation.INFER, Operation.MANAGE}),
            tokens=frozenset({DIGEST}),
            listeners=frozenset({"grpc_endpoint", "http_endpoint"}),
            quota=Quota(0.5, 1.0, 3),
        ),
        Caller(
            "mesh",
            frozenset({Operation.RUNTIME}),
            unix_users=frozenset({0, 1000}),
            tls=frozenset({"subject:commonName=mesh", "URI:spiffe://a/b"}),
        ),
        Caller(
            "people",
            frozenset({Operation.PAGE}),
            subjects=frozenset({"*"}),
            quota=Quota(4.0, 9.0),
        ),
        Caller("anyone", frozenset({Operation.HEALTH}), anyone=True),
    ),
    SignedTokens("keys.json", "https://issuer.example", "xlaserve", 5.0),
)


def test_rules_are_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "rules"
    file.write_text(TOML)

    assert RULES == read_rules(file)


def test_rules_are_read_from_json(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(
        json.dumps(
            {"caller": [{"name": "ci", "token": [DIGEST], "allow": ["infer"], "burst": 2.5}]}
        ).replace('"burst"', '"requests_per_second"')
    )
    quota = Quota(2.5, 2.5)

    (caller,) = read_rules(file).callers
    assert ("ci", frozenset({DIGEST}), quota) == (caller.name, caller.tokens, caller.quota)


def caller(more: str, *, allow: str = '["infer"]') -> str:
    return f'[[caller]]\nname = "a"\nallow = {allow}\n{more}\n'


WRONG = {
    "[[caller]\n": "(at line 1, column 9)",
    "callers = 3": "access_rules: callers: expected one of caller, signed_tokens",
    "caller = 3": "access_rules: caller: expected a list of tables",
    "caller = [3]": "access_rules: caller[0]: expected a table, got '3 (",
    '[[caller]]\nname = "a"\nanyone = true': "caller[0]: expected the key allow",
    '[[caller]]\nallow = ["infer"]\nanyone = true': "caller[0]: expected the key name",
    caller(""): "caller[0]: expected one of token, tls, unix_user, subject, anyone",
    caller(
        "anyone = false"
    ): "caller[0].anyone: expected true (otherwise leave the key out), got 'False (",
    caller('tokens = "x"'): "caller[0].tokens: expected one of name, allow, token",
    caller('token = "secret"'): "caller[0].token: expected sha256: and 64 hex digits",
    caller(f'token = "{DIGEST.upper()}"'): "caller[0].token: expected sha256: and 64",
    caller("token = []"): "caller[0].token: expected sha256:",
    caller("unix_user = true"): "caller[0].unix_user: expected a numeric user id",
    caller('unix_user = "0"'): "caller[0].unix_user: expected a numeric user id",
    caller("unix_user = -1"): "caller[0].unix_user: expected a numeric user id",
    caller('tls = "commonName=a"'): "caller[0].tls: expected a string that starts with subject:",
    caller('listener = "grpc"\nanyone = true'): "caller[0].listener: expected one of grpc_end",
    caller("listener = []\nanyone = true"): "caller[0].listener: expected one of grpc_end",
    caller("anyone = true", allow='"infer"'): "caller[0].allow: expected a list of infer, met",
    caller("anyone = true", allow="[]"): "caller[0].allow: expected a list of infer, metadata",
    caller("anyone = true", allow='["all"]'): "caller[0].allow: expected a list of infer, met",
    caller("anyone = true", allow='[["infer"]]'): "caller[0].allow: expected a list of infer",
    caller('subject = "*"'): "caller[0].subject: expected a table [signed_tokens]",
    caller("anyone = true\nrequests_per_second = 0"): "requests_per_second: expected a number abo",
    caller("anyone = true\nrequests_per_second = nan"): "requests_per_second: expected a number",
    caller("anyone = true\nrequests_per_second = inf"): "requests_per_second: expected a number",
    caller("anyone = true\nrequests_per_second = true"): "requests_per_second: expected a numb",
    caller("anyone = true\nmodels = []"): "caller[0].models: expected the name of a model, or a p",
    caller('anyone = true\nmodels = [" "]'): "caller[0].models: expected the name of a model",
    caller("anyone = true\nmodels = 7"): "caller[0].models: expected the name of a model",
    caller('anyone = true\nmodels = "m"', allow='["infer", "metrics"]'): "no models with metrics",
    caller('anyone = true\nmodels = "m"', allow='["service"]'): "no models with service",
    caller('anyone = true\nmodels = "m"', allow='["runtime"]'): "no models with runtime",
    caller("anyone = true\nburst = 3"): "caller[0].burst: expected also requests_per_second",
    caller("anyone = true\nconcurrent_requests = 0"): "concurrent_requests: expected an integer",
    caller("anyone = true\nconcurrent_requests = 1.5"): "concurrent_requests: expected an integer",
    caller("anyone = true").replace('"a"', '"a/b"'): "caller[0].name: expected a name without /",
    caller("anyone = true").replace('"a"', '" "'): "caller[0].name: expected a text",
    caller("anyone = true").replace('"a"', '"a\\n"'): "caller[0].name: expected a text",
    caller("anyone = true") * 2: "caller: expected unique names, got 'a (",
    '[signed_tokens]\nkeys = "k"\nissuer = "i"': "signed_tokens: expected the key audience",
    '[signed_tokens]\nalgorithms = "none"': "signed_tokens.algorithms: expected one of keys",
    "[signed_tokens]\nleeway_seconds = -1": "signed_tokens.leeway_seconds: expected a number",
}


@pytest.mark.parametrize(("text", "expected"), WRONG.items(), ids=list(WRONG.values()))
def test_a_mistake_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)

    with pytest.raises(InvalidSettings) as refused:
        read_rules(file)
    assert expected in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"caller": [], "caller": []}',
        b'{"caller": ' + b"[" * 100_000,
        b"[]",
        b"\xff",
        b"{",
        b'{"caller": []}' + b" " * (1 << 20),
    ],
    ids=["twice", "deep", "list", "not utf-8", "cut", "large"],
)
def test_what_is_no_object_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "rules.json"
    file.write_bytes(data)

    with pytest.raises(InvalidSettings, match="access_rules"):
        read_rules(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="expected a file of rules, got .*No such file"):
        read_rules(tmp_path / "none")


def test_a_secret_that_stands_in_the_file_is_not_repeated_whole(tmp_path: Path) -> None:
    """An operator may paste the token itself, and others read the log."""
    file = tmp_path / "rules.toml"
    secret = "xla_abcdefghijklmnopqrstuvwxyz0123456789ABCDE"
    file.write_text(caller(f'token = "{secret}"'))

    with pytest.raises(InvalidSettings) as refused:
        read_rules(file)
    assert secret[8:] not in str(refused.value)
