"""The permission check: its cache, and the effect of a reload."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from structlog.testing import capture_logs
from support.clock import HandClock

from xlaserve.errors import InvalidSettings
from xlaserve.errors.access import NotPermitted, QuotaExceeded, Unauthenticated
from xlaserve.serving.access import control
from xlaserve.serving.access.control import AccessControl
from xlaserve.serving.access.principal import KnownBy, Principal
from xlaserve.serving.access.restrictions import Restrictions
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.serving.call import Call, Operation, Peer
from xlaserve.settings import Settings

T = TypeVar("T")

TOKEN = new_token()
NOW = 4_000_000_000.0
"""Later than the wall clock that the JWT library reads."""


async def wait(call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call)


def entry(name: str, *allow: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "allow": list(allow), **more}


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    return tmp_path / "rules.json"


def write(file: Path, *callers: dict[str, Any], **more: Any) -> None:
    file.write_text(json.dumps({"caller": list(callers), **more}))


def access_to(file: Path | None, clock: Callable[[], float] = HandClock(NOW)) -> AccessControl:  # noqa: B008
    return AccessControl(file, None, max_principals=10, clock=clock, monotonic=HandClock())


def asking(
    operation: Operation = Operation.INFER, token: str | None = None, peer: Peer | None = None
) -> Call:
    call = Call()
    call.operation = operation
    call.headers = {} if token is None else {"authorization": f"Bearer {token}"}
    call.peer = peer or Peer("grpc_endpoint", "10.0.0.7:1")
    return call


def outcome(access: AccessControl, call: Call) -> Principal | type[Exception] | None:
    try:
        access.check(call)
    except (Unauthenticated, NotPermitted, QuotaExceeded) as error:
        return type(error)
    return call.principal


def test_without_rules_everybody_may_do_everything() -> None:
    access = access_to(None)

    assert not access.is_needed
    assert outcome(access, asking(Operation.MANAGE)) is None
    assert access.sees(asking(), Operation.READINESS)("m")


def test_the_best_that_a_caller_shows_counts(file: Path) -> None:
    """The permissions of all its credentials add up; those of anonymous callers come last."""
    write(
        file,
        entry("anyone", "health", anyone=True),
        entry("here", "health", "metadata", unix_user=7),
        entry("ci", "health", "manage", token=digest_of(TOKEN)),
    )
    access = access_to(file)
    peer = Peer("grpc_endpoint", "unix", None, 7)
    here, ci = Principal("here", KnownBy.UNIX_USER), Principal("ci", KnownBy.TOKEN)

    assert Principal("anyone") == outcome(access, asking(Operation.HEALTH))
    assert here == outcome(access, asking(Operation.HEALTH, peer=peer))
    assert ci == outcome(access, asking(Operation.HEALTH, TOKEN, peer))
    assert ci == outcome(access, asking(Operation.MANAGE, TOKEN, peer))
    assert here == outcome(access, asking(Operation.READINESS, "wrong", peer))
    assert NotPermitted is outcome(access, asking(Operation.INFER, TOKEN, peer))
    assert Unauthenticated is outcome(access, asking(Operation.INFER, "wrong"))


@pytest.mark.parametrize(
    ("shown", "principal"),
    [
        ("subject:commonName=a", "a"),
        ("DNS:b.example", "b"),
        ("URI:spiffe://c", None),
        ("commonName=a", None),
    ],
)
def test_certificates_are_known_by_subject_and_names(
    file: Path, shown: str, principal: str | None
) -> None:
    write(file, entry("a", "infer", tls="subject:commonName=a"), entry("b", "infer", tls=shown))
    peer = Peer("grpc_endpoint", "", "commonName=a", tls_names=("DNS:b.example",))
    other = Peer("grpc_endpoint", "", "commonName=x", tls_names=("DNS:b.example",))
    if shown == "commonName=a":
        with pytest.raises(InvalidSettings):
            access_to(file)
        return
    found = outcome(access_to(file), asking(peer=other))

    assert Principal("a", KnownBy.TLS) == outcome(access_to(file), asking(peer=peer))
    assert (Principal("b", KnownBy.TLS) if principal == "b" else Unauthenticated) == found


def test_part_of_a_call_is_permitted_with_it(file: Path) -> None:
    write(file)
    access = access_to(file)
    part = asking()
    part.parent = asking(Operation.SERVICE)

    access.check(part)
    access.check(Call())
    assert Unauthenticated is outcome(access, asking(peer=Peer()))


async def test_a_reload_forgets_what_was_found(file: Path) -> None:
    """This also applies to open connections."""
    write(file, entry("ci", "infer", token=digest_of(TOKEN)))
    access, peer = access_to(file), Peer("grpc_endpoint", "10.0.0.7:1")
    before = outcome(access, asking(token=TOKEN, peer=peer))
    write(file, entry("next", "infer", token=digest_of(TOKEN)))
    meanwhile = outcome(access, asking(token=TOKEN, peer=peer))
    await access.reload(wait)
    after = outcome(access, asking(token=TOKEN, peer=peer))
    write(file)
    await access.reload(wait)

    assert Principal("ci", KnownBy.TOKEN) == before == meanwhile
    assert Principal("next", KnownBy.TOKEN) == after
    assert Unauthenticated is outcome(access, asking(token=TOKEN, peer=peer))


@pytest.mark.parametrize("text", ["{", '{"callers": []}', None], ids=["cut", "key", "gone"])
async def test_rules_that_are_wrong_change_nothing(file: Path, text: str | None) -> None:
    write(file, entry("ci", "infer", token=digest_of(TOKEN)))
    access = access_to(file)
    file.unlink() if text is None else file.write_text(text)

    with pytest.raises(InvalidSettings, match="access_rules"):
        await access.reload(wait)
    assert Principal("ci", KnownBy.TOKEN) == outcome(access, asking(token=TOKEN))
    assert Unauthenticated is outcome(access, asking())


def test_wrong_rules_are_no_start(file: Path) -> None:
    file.write_text("{")

    with pytest.raises(InvalidSettings, match="access_rules"):
        access_to(file)


def test_a_connection_remembers_few_tokens_and_none_that_is_unknown(file: Path) -> None:
    tokens = [new_token() for _ in range(40)]
    write(file, entry("many", "infer", token=[digest_of(token) for token in tokens]))
    access, peer = access_to(file), Peer("grpc_endpoint", "10.0.0.7:1")
    for token in tokens:
        assert Unauthenticated is outcome(access, asking(token=new_token(), peer=peer))
        assert Principal("many", KnownBy.TOKEN) == outcome(access, asking(token=token, peer=peer))
        assert len(peer.granted) <= control._MAX_GRANTED
    known = {f"Bearer {token}" for token in tokens}

    assert peer.granted.keys() <= known


def test_a_quota_counts_calls_and_not_the_streams_that_carry_them(file: Path) -> None:
    write(file, entry("ci", "infer", token=digest_of(TOKEN), concurrent_requests=1))
    access = access_to(file)
    stream = asking(token=TOKEN)
    stream.carries_calls = True
    first = asking(token=TOKEN)

    assert Principal("ci", KnownBy.TOKEN) == outcome(access, stream) == outcome(access, first)
    assert QuotaExceeded is outcome(access, asking(token=TOKEN))
    first.cancel()
    assert Principal("ci", KnownBy.TOKEN) == outcome(access, asking(token=TOKEN))


@pytest.mark.parametrize("allow", ["runtime", "infer"])
def test_a_mesh_that_may_not_load_is_named_in_the_log(file: Path, allow: str) -> None:
    write(file, entry("mesh", allow, unix_user=0))
    settings = Settings.read({}, repository="/", modelmesh=True, access_rules=str(file))
    with capture_logs() as log:
        AccessControl.of(settings)

    warned = [record["event"] for record in log if record["log_level"] == "warning"]
    assert ([] if allow == "runtime" else ["mesh cannot load models"]) == warned


# --- signed tokens ------------------------------------------------------------------------------

KEY, NEXT_KEY = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))


def key_set(key: Any) -> bytes:
    public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return json.dumps({"keys": [{**public, "kid": "k"}]}).encode()


def signed(key: Any = KEY, subject: str = "alice", until: float = NOW + 60) -> str:
    claims = {"iss": "i", "aud": "a", "sub": subject, "exp": until}
    return jwt.encode(claims, key, "ES256", {"kid": "k"})


def write_signed(file: Path, keys: str) -> None:
    signed_tokens = {"keys": keys, "issuer": "i", "audience": "a", "leeway_seconds": 0}
    write(
        file,
        entry("alice", "manage", subject="alice"),
        entry("people", "infer", subject="*"),
        signed_tokens=signed_tokens,
    )


def test_a_signed_token_expires_on_a_connection_that_is_open(file: Path) -> None:
    keys = file.with_name("keys")
    keys.write_bytes(key_set(KEY))
    write_signed(file, str(keys))
    clock, peer = HandClock(NOW), Peer("grpc_endpoint", "10.0.0.7:1")
    access = access_to(file, clock)
    alice = Principal("alice/alice", KnownBy.SIGNED_TOKEN)
    bob = Principal("people/bob", KnownBy.SIGNED_TOKEN)

    assert alice == outcome(access, asking(Operation.MANAGE, signed(), peer))
    assert bob == outcome(access, asking(Operation.INFER, signed(subject="bob"), peer))
    assert NotPermitted is outcome(access, asking(Operation.MANAGE, signed(subject="bob"), peer))
    token = signed()
    assert alice == outcome(access, asking(Operation.MANAGE, token, peer))
    clock.now += 61
    assert Unauthenticated is outcome(access, asking(Operation.MANAGE, token, peer))


def test_keys_of_a_file_have_to_be_there(file: Path) -> None:
    write_signed(file, str(file.with_name("none")))

    with pytest.raises(InvalidSettings, match="signed_tokens.keys: expected a key set"):
        access_to(file)


def test_without_the_library_signed_tokens_are_refused_at_the_start(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_signed(file, str(file))
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)

    with pytest.raises(InvalidSettings, match=r"pip install 'xlaserve\[jwt\]'"):
        access_to(file)


@contextmanager
def issuer(answers: dict[str, Any]) -> Iterator[str]:
    """Serve keys on a free port for the length of a block, as `answers` says at the time."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers["status"])
            self.send_header("Location", answers.get("location", ""))
            self.end_headers()
            self.wfile.write(answers["body"])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/keys"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(name="following")
async def _following(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[[AccessControl], None]]:
    monkeypatch.setattr(control, "_AGAIN_SECONDS", 0.01)
    tasks = []

    def follow(access: AccessControl) -> None:
        tasks.append(asyncio.ensure_future(access.follow_keys(wait)))

    yield follow
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_keys_of_a_url_come_once_it_answers(
    file: Path, following: Callable[[AccessControl], None]
) -> None:
    """The server starts without them and accepts no signed token until they arrive."""
    alice = Principal("alice/alice", KnownBy.SIGNED_TOKEN)
    answers: dict[str, Any] = {"status": 500, "body": b""}
    with issuer(answers) as url:
        write_signed(file, url)
        access = await wait(lambda: access_to(file))
        first = outcome(access, asking(Operation.MANAGE, signed()))
        following(access)
        answers.update(status=200, body=key_set(KEY))
        await until(lambda: outcome(access, asking(Operation.MANAGE, signed())) == alice)

    assert Unauthenticated is first
    # The issuer stopped answering: the keys are kept.
    await access.reload(wait)
    assert alice == outcome(access, asking(Operation.MANAGE, signed()))


async def test_keys_are_read_again_and_old_ones_forgotten(file: Path) -> None:
    answers: dict[str, Any] = {"status": 200, "body": key_set(KEY)}
    with issuer(answers) as url:
        write_signed(file, url)
        access, peer = await wait(lambda: access_to(file)), Peer("grpc_endpoint", "10.0.0.7:1")
        old, new = asking(Operation.MANAGE, signed()), asking(Operation.MANAGE, signed(NEXT_KEY))
        old.peer = new.peer = peer
        before = [outcome(access, call) for call in (old, new)]
        answers["body"] = key_set(NEXT_KEY)
        await access.reload(wait)
        after = [outcome(access, call) for call in (old, new)]

    alice = Principal("alice/alice", KnownBy.SIGNED_TOKEN)
    assert [alice, Unauthenticated] == before
    assert [Unauthenticated, alice] == after


async def test_no_redirect_is_followed_to_another_machine(file: Path) -> None:
    with issuer({"status": 200, "body": key_set(KEY)}) as there:
        answers = {"status": 302, "body": b"", "location": there}
        with issuer(answers) as url:
            write_signed(file, url)
            access = await wait(lambda: access_to(file))

    assert Unauthenticated is outcome(access, asking(Operation.MANAGE, signed()))


@pytest.mark.parametrize("key", ["right", "wrong"])
def test_what_a_client_may_do_with_which_models_is_told(file: Path, key: str) -> None:
    """Rules and Triton's groups both count: a page offers no action that either refuses."""
    token = digest_of(TOKEN)
    page = entry("operator", "page", "infer", token=token)
    write(file, page, entry("tenant", "manage", token=token, models=["a-*"]))
    restrictions = Restrictions.of((), ("model-repository:key=right",))
    access = AccessControl(
        file, restrictions, max_principals=10, clock=HandClock(NOW), monotonic=HandClock()
    )
    call = asking(Operation.PAGE, TOKEN, Peer("http_endpoint"))
    call.headers = {"authorization": f"Bearer {TOKEN}", "key": key}
    manages = access.permits(call, Operation.MANAGE)

    assert [key == "right", False] == [manages("a-1"), manages("b")]
    assert access.permits(call, Operation.INFER)("b")
    assert not access.permits(call, Operation.METADATA)("a-1")


def write_both(file: Path, keys: str, token: str = "") -> None:
    """Write rules for a caller with a token, and for callers with signed tokens."""
    write_signed(file, keys)
    rules = json.loads(file.read_text())
    known = digest_of(token or new_token())
    rules["caller"].append(entry("app", "infer", token=known))
    file.write_text(json.dumps(rules))


def _made_a_directory(keys: Path) -> None:
    keys.unlink()
    keys.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda keys: keys.write_text(keys.read_text()[:20]),
    "empty": lambda keys: keys.write_bytes(b""),
    "gone": lambda keys: keys.unlink(),
    "without a key": lambda keys: keys.write_text('{"keys": []}'),
    "a directory": _made_a_directory,
    "too large": lambda keys: keys.write_bytes(b" " * (2 << 20)),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_keys_do_not_hold_up_what_is_revoked(file: Path, damage: str) -> None:
    """The old keys are kept, and the other rules of the file apply immediately."""
    keys = file.with_name("keys")
    keys.write_bytes(key_set(KEY))
    write_both(file, str(keys), TOKEN)
    access = access_to(file)
    alice = Principal("alice/alice", KnownBy.SIGNED_TOKEN)
    access.check(asking(token=TOKEN))
    DAMAGES[damage](keys)
    write_both(file, str(keys))
    with capture_logs() as log:
        await access.reload(wait)

    assert Unauthenticated is outcome(access, asking(token=TOKEN))
    assert alice == outcome(access, asking(Operation.MANAGE, signed()))
    assert ["signed-token keys not updated"] == [
        line["event"] for line in log if line["log_level"] == "error"
    ]


async def test_keys_that_do_not_come_hold_up_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked token is refused while keys are being fetched and afterwards."""
    monkeypatch.setattr(control, "_KEYS_SECONDS", 0.0)
    keys = file.with_name("keys")
    keys.write_bytes(key_set(KEY))
    write_both(file, str(keys), TOKEN)
    access = access_to(file)
    comes = asyncio.Event()

    async def slow(call: Callable[[], T]) -> T:
        found = call()
        if isinstance(found, tuple):
            await comes.wait()
        return found

    await access.reload(slow)
    access.check(asking(token=TOKEN))
    write_both(file, str(keys))
    await access.reload(slow)
    assert Unauthenticated is outcome(access, asking(token=TOKEN))
    comes.set()
    await until(lambda: not access._reading_keys)

    assert Unauthenticated is outcome(access, asking(token=TOKEN))
    alice = Principal("alice/alice", KnownBy.SIGNED_TOKEN)
    assert alice == outcome(access, asking(Operation.MANAGE, signed()))
