"""F3 and F4: bytes at random to a running server, and how each of them is answered."""

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from support.conversations import mutated
from support.floods import Attacker
from support.http import connect, message

from acceptance.boofuzzed import fuzz as boofuzz
from acceptance.figures import Outcome, percentile
from acceptance.subjects import Subject, export_models, serving
from acceptance.victim_process import victim

_LANES = 8
_HANG_SECONDS = 2.0
_END_SECONDS = 5.0
_ALLOWED = frozenset({501, 503, 505, 507})
_ATOMS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    2**70,
    1e308,
    "",
    "x",
    "\0",
    "é",
    [],
    {},
    [[]],
)
_PATHS = (
    "/v2/models/echo/infer",
    "/v2/models/plus/infer",
    "/v2/models/texts/versions/1/infer",
    "/v2/models/echo/generate",
    "/v2/repository/index",
    "/v2/repository/models/absent/load",
    "/v2/repository/models/absent/unload",
    "/v2/systemsharedmemory/region/a/register",
    "/v2/logging",
    "/v2/trace/setting",
    "/invocations",
    "/v2/models/stats",
    "/v2/health/live",
    "/metrics",
    "/",
)
_METHODS = ("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW")
_BROKEN_LINES = (
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\n",
    b"GET /%00%ff%2e%2e/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\n X: y\r\n\r\n",
)


def http(folder: Path, *, count: int = 200_000, boofuzzed: int = 20_000) -> Outcome:
    """Send requests over HTTP that are damaged, or made up, to every kind of address.

    `boofuzzed` more of them are made by boofuzz.
    """
    export_models(folder / "models")
    outcome = Outcome()
    with serving(folder) as subject:
        asyncio.run(_http(subject, count, outcome))
        boofuzz(subject, boofuzzed, outcome)
        outcome.add("server", subject.is_running, "runs", holds=subject.is_running)
    return outcome


async def _http(subject: Subject, count: int, outcome: Outcome) -> None:
    statuses: Counter[int] = Counter()
    faults, hangs, seconds = list[str](), list[str](), list[float]()

    async def lane(random: Random) -> None:
        sent = 0
        while sent < count // _LANES and len(faults) < 100:
            async with connect(subject.http) as client:
                for _ in range(100):
                    sent += 1
                    octets, is_head = _request(random)
                    began = time.monotonic()
                    try:
                        async with asyncio.timeout(_HANG_SECONDS * 5):
                            answer = await client.ask(octets, head=is_head)
                    except (asyncio.IncompleteReadError, ConnectionError):
                        statuses[0] += 1
                        break
                    except TimeoutError:
                        hangs.append(repr(octets[:200]))
                        break
                    seconds.append(time.monotonic() - began)
                    if seconds[-1] > _HANG_SECONDS:
                        hangs.append(repr(octets[:200]))
                    statuses[answer.status] += 1
                    if answer.status >= 500 and answer.status not in _ALLOWED:
                        faults.append(f"{answer.status} {answer.body[:100]!r} to {octets[:300]!r}")
                    if answer.headers.get("connection") == "close":
                        break
            with suppress(OSError):
                await client.writer.wait_closed()

    async with asyncio.TaskGroup() as group:
        for number in range(_LANES):
            group.create_task(lane(Random(f"http {number}")))
    outcome.note("requests", f"{sum(statuses.values())}: {dict(sorted(statuses.items()))}")
    outcome.at_least("requests that were answered", len(seconds), count // 2)
    outcome.none("5xx but 501, 503, 505, 507", faults)
    outcome.none(f"longer than {_HANG_SECONDS:g} s", hangs)
    outcome.note("p99.9", f"{percentile(seconds, 99.9) * 1e3:.1f} ms")


def _request(random: Random) -> tuple[bytes, bool]:
    """Return a request, and whether its answer has no body."""
    if random.random() < 0.02:
        return random.choice(_BROKEN_LINES), False
    method = random.choice(_METHODS) if random.random() < 0.1 else "POST"
    path = random.choice(_PATHS)
    if random.random() < 0.2:
        path = path.replace(random.choice(path), random.choice(("%00", "%2e%2e%2f", "//", "é")))
    headers = [("Content-Type", "application/json")]
    body = json.dumps(_body(random)).encode()
    if random.random() < 0.3:
        headers.append(("Inference-Header-Content-Length", str(_length(random, len(body)))))
        body += random.randbytes(random.randint(0, 64))
    if random.random() < 0.6:
        body = _damaged(random, body)
    if random.random() < 0.05:
        headers.append(("Content-Encoding", random.choice(("gzip", "deflate", "br", "x"))))
    octets = message(method, path, *headers, body=body, length=len(body))
    return octets, method == "HEAD"


def _length(random: Random, right: int) -> object:
    return random.choice((right, right, right - 1, right + 1, 0, -1, "x", 2**64, ""))


def _body(random: Random) -> Any:
    tensor: dict[str, Any] = {
        "name": "x",
        "datatype": random.choice(("FP32", "FP32", "BYTES", "INT64", "FP16", "BOOL", "X")),
        "shape": random.choice(([1], [1, 16], [2, 8], [-1], [2**62, 4], [0], "x")),
        "data": random.choice(([1], [1] * 16, ["a"], [[1], [2]], [None], [float("nan")], [2**70])),
    }
    if random.random() < 0.3:
        sizes = (4, 64, -1, "x", 2**63, None)
        tensor["parameters"] = {"binary_data_size": random.choice(sizes)}
    whole: dict[str, Any] = {"id": "1", "inputs": [tensor], "outputs": [{"name": "y"}]}
    for _ in range(random.randrange(3)):
        place: Any = random.choice((whole, tensor, whole.get("parameters", whole)))
        if isinstance(place, dict) and place:
            key = random.choice([*place, "parameters", "text_input"])
            place[key] = random.choice(_ATOMS)
    return whole


def _damaged(random: Random, body: bytes) -> bytes:
    damaged = bytearray(body or b"x")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(damaged))
        how = random.randrange(5)
        if how == 0:
            damaged[at] ^= 1 << random.randrange(8)
        elif how == 1:
            del damaged[at:]
        elif how == 2:
            damaged[at:at] = random.randbytes(random.randint(1, 4))
        elif how == 3:
            damaged[at:at] = random.choice((b"[" * 200, b"9" * 400, b'"', b"}", b"1e999", b"NaN"))
        else:
            damaged[at : at + 8] = b""
        if not damaged:
            break
    return bytes(damaged)


# --- F4 ----------------------------------------------------------------------------------------


def http2(folder: Path, *, count: int = 100_000) -> Outcome:
    """Send mutated conversations of HTTP/2, each on a connection of its own, beside a victim."""
    from support.victim import export_models as export_victims

    export_victims(folder / "models")
    outcome, random = Outcome(), Random("http2")
    ends: Counter[str] = Counter()
    silent = list[str]()
    with serving(folder) as subject:
        with victim(subject.grpc) as seen:
            for _ in range(count):
                spoken = mutated(random)
                end, seconds = _speak(subject.grpc, b"".join(spoken))
                ends[end] += 1
                if seconds > _END_SECONDS:
                    silent.append(b"".join(spoken)[24:200].hex())
                if len(silent) >= 10 or not subject.is_running:
                    break
        outcome.add("server", subject.is_running, "runs", holds=subject.is_running)
    outcome.at_least("conversations", sum(ends.values()), count)
    outcome.none("neither answered, reset nor ended in 5 s", silent)
    outcome.none("errors of the victim", seen.errors)
    outcome.note("calls of the victim", seen.calls)
    outcome.note("ends", dict(ends.most_common(12)))
    return outcome


def _speak(url: str, octets: bytes) -> tuple[str, float]:
    """Send everything; return how the connection ended, and how long that took."""
    began = time.monotonic()
    attacker = Attacker(url, greets=False)
    try:
        attacker.send(octets)
        # What was cut off is known to be: nobody waits for the rest of it.
        attacker.finish()
        end = began + _END_SECONDS + 0.5
        attacker.read(lambda: attacker.goaway is not None or time.monotonic() > end)
        statuses = attacker.statuses()
        if attacker.goaway is None and statuses:
            return f"status or reset {min(statuses)}", time.monotonic() - began
        return attacker.outcome, time.monotonic() - began
    finally:
        attacker.close()
