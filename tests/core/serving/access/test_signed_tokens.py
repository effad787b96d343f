"""Signed tokens: RS256 and ES256 with the keys of one issuer, and nothing else."""

import base64
import datetime
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from structlog.testing import capture_logs
from support.clock import HandClock

from xlaserve.errors import InvalidSettings
from xlaserve.serving.access.key_set import is_url, parse_keys, read_keys
from xlaserve.serving.access.rules import SignedTokens
from xlaserve.serving.access.signed_tokens import Subject, Verifier

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
SHORT = rsa.generate_private_key(public_exponent=65537, key_size=1024)
P384 = ec.generate_private_key(ec.SECP384R1())

NOW = 1_900_000_000.0
CLAIMS: dict[str, Any] = {
    "iss": "https://issuer.example",
    "aud": "xlaserve",
    "sub": "alice",
    "exp": NOW + 60,
}
RULES = SignedTokens("keys.json", "https://issuer.example", "xlaserve", leeway_seconds=0)


def public(key: Any, **more: Any) -> dict[str, Any]:
    kind: Any = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    return {**kind.to_jwk(key.public_key(), as_dict=True), **more}


KEY_SET = {"keys": [public(RSA, kid="r"), public(EC, kid="e")]}


@pytest.fixture(name="clock", autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """Replace the wall clock, for the JWT library too."""
    clock = HandClock(NOW)

    class Time:
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.fromtimestamp(clock.now, tz)

    real = datetime.datetime
    monkeypatch.setattr("jwt.api_jwt.datetime", Time)
    return clock


def verifier(clock: Callable[[], float], key_set: object = KEY_SET) -> Verifier:
    return Verifier(RULES, parse_keys(json.dumps(key_set).encode(), "test"), clock)


def signed(key: Any = RSA, algorithm: str = "RS256", kid: str | None = "r", **changed: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changed}.items() if value is not None}
    return jwt.encode(claims, key, algorithm, None if kid is None else {"kid": kid})


@pytest.mark.parametrize(
    "token",
    [
        signed(),
        signed(EC, "ES256", "e"),
        signed(kid=None),
        signed(aud=["other", "xlaserve"]),
        signed(nbf=NOW - 1, iat=NOW - 1),
    ],
    ids=["RS256", "ES256", "one key", "audiences", "not before"],
)
def test_a_token_of_the_issuer_has_a_subject(clock: HandClock, token: str) -> None:
    assert Subject("alice", NOW + 60) == verifier(clock).subject_of(token)


def forged(header: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """Build a token that no JWT library would issue."""

    def part(value: bytes) -> bytes:
        return base64.urlsafe_b64encode(value).rstrip(b"=")

    text = part(json.dumps(header).encode()) + b"." + part(json.dumps(CLAIMS).encode())
    return (text + b"." + part(sign(text))).decode()


def hmac_by(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda text: hmac.new(secret, text, hashlib.sha256).digest()


PEM = RSA.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
HEADER = {"alg": "RS256", "typ": "JWT", "kid": "r"}
REFUSED = {
    "no signature": forged({**HEADER, "alg": "none"}, lambda _: b"x"),
    "an empty signature": forged({**HEADER, "alg": "none"}, lambda _: b""),
    "the public key as a secret": forged({**HEADER, "alg": "HS256"}, hmac_by(PEM)),
    "that under another name": forged(HEADER, hmac_by(PEM)),
    "the other algorithm": forged({**HEADER, "alg": "ES256"}, hmac_by(PEM)),
    "a key of its own": forged({**HEADER, "jwk": public(OTHER)}, hmac_by(b"x")),
    "extensions": jwt.encode(CLAIMS, RSA, "RS256", {"kid": "r", "crit": ["exp"]}),
    "another key": signed(OTHER),
    "RS512": signed(RSA, "RS512"),
    "PS256": signed(RSA, "PS256"),
    "an unknown key": signed(kid="x"),
    "expired": signed(exp=NOW - 1),
    "no expiry": signed(exp=None),
    "an expiry of text": jwt.encode({**CLAIMS, "exp": "never"}, RSA, "RS256", {"kid": "r"}),
    "not yet": signed(nbf=NOW + 1),
    "another issuer": signed(iss="https://evil.example"),
    "no issuer": signed(iss=None),
    "another audience": signed(aud="other"),
    "no audience": signed(aud=None),
    "no subject": signed(sub=None),
    "an empty subject": signed(sub=""),
    "a long subject": signed(sub="x" * 257),
    "control characters": signed(sub="a\nb"),
    "a long token": signed(more="x" * 9000),
    "a changed token": signed()[:-20] + "A" * 20,
    "no token": "a.b.c",
    "two parts": "a.b",
}


@pytest.mark.parametrize("token", REFUSED.values(), ids=list(REFUSED))
def test_any_other_token_is_nobodys(clock: HandClock, token: str) -> None:
    assert verifier(clock).subject_of(token) is None


def test_a_token_that_was_valid_expires(clock: HandClock) -> None:
    made, token = verifier(clock), signed()

    assert made.subject_of(token) is not None
    clock.now += 61
    assert made.subject_of(token) is None


def test_a_number_of_tokens_is_remembered(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xlaserve.serving.access import signed_tokens

    monkeypatch.setattr(signed_tokens, "_MAX_CACHED", 3)
    made = verifier(clock)
    for number in range(10):
        assert made.subject_of(signed(sub=str(number))) is not None
        assert len(made._known) <= 3


def test_two_keys_of_one_name_verify_nothing(clock: HandClock) -> None:
    """It is ambiguous which key a token means."""
    twice = {"keys": [public(RSA, kid="r"), public(OTHER, kid="r")]}

    assert verifier(clock, twice).subject_of(signed()) is None
    assert verifier(clock, twice).subject_of(signed(kid=None)) is None


NOT_USED = {
    "a secret": {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
    "a private key": RSAAlgorithm.to_jwk(RSA, as_dict=True),
    "a short key": public(SHORT),
    "another curve": public(P384),
    "encryption": public(RSA, use="enc"),
    "another algorithm": public(RSA, alg="RS512"),
    "nothing": {},
    "no object": 3,
}


@pytest.mark.parametrize("key", NOT_USED.values(), ids=list(NOT_USED))
def test_a_key_of_another_kind_is_not_used(key: object) -> None:
    (used,) = parse_keys(json.dumps({"keys": [key, public(EC, kid="e")]}).encode(), "test")

    assert ("e", "ES256") == (used.id, used.algorithm)


def test_the_log_says_that_a_key_is_no_public_one() -> None:
    with capture_logs() as log:
        parse_keys(json.dumps({"keys": [NOT_USED["a private key"], public(EC)]}).encode(), "test")

    assert ["expected a public key, RSA or EC"] == [record["reason"] for record in log]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"keys": 3}', b'{"keys": []}', b"[" * 99999])
def test_what_holds_no_key_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(data)

    with pytest.raises(InvalidSettings, match="signed_tokens.keys"):
        read_keys(str(file))


def test_keys_are_read_from_a_file_of_bounded_size(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(KEY_SET))
    assert ["r", "e"] == [key.id for key in read_keys(str(file))]

    file.write_text(json.dumps(KEY_SET) + " " * (1 << 20))
    with pytest.raises(InvalidSettings, match="at most 1048576 bytes"):
        read_keys(str(file))


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/keys",
        "http://keys.example/",
        "http://10.0.0.7/",
        "http://127.0.0.1@keys.example/",
        "http://127.0.0.1.example/",
        "file:///etc/keys",
        "http://[::2]/",
        "http://",
    ],
)
def test_keys_come_from_no_other_machine(url: str) -> None:
    with pytest.raises(InvalidSettings, match="an address of this machine"):
        is_url(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:80/keys", "http://[::1]/keys", "http://localhost/keys"]
)
def test_keys_come_from_this_machine(url: str) -> None:
    assert is_url(url)
