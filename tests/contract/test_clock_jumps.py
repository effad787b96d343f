"""The wall clock jumps while a server runs: timeouts are unaffected, and credentials follow it.

`test_clocks.py` lists each use of that clock. Here it jumps during all waits at the same time.
"""

import asyncio
import json
import re
import signal
from contextlib import AsyncExitStack
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from support.conditions import until
from support.http import Connection, connect, message
from support.otlp import collecting
from support.process import START_SECONDS, served
from support.python_models import write
from support.wall import wall

from xlaserve.serving.access.tokens import digest_of, new_token

HOUR, DAY = 3600, 86400
LONG_SECONDS = HOUR // 2
"""Every limit: longer than any test, and shorter than both jumps."""
VECTORS = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
QUEUED = f"""
max_batch_size: 4
dynamic_batching {{
  default_queue_policy {{
    default_timeout_microseconds: {LONG_SECONDS}000000 allow_timeout_override: true
  }}
}}
"""
GATED = """
import pathlib, time

class Model(PythonModel):
    def load(self, context):
        self.wait({load!r})

    def infer(self, inputs):
        if inputs["x"].any():  # warm-ups are of zeros
            self.wait({infer!r})
        return {{"y": inputs["x"]}}

    def wait(self, name):
        if not name:
            return
        pathlib.Path(name + "-begun").touch()
        while not pathlib.Path(name).exists():
            time.sleep(0.01)
"""
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
KEY = ec.generate_private_key(ec.SECP256R1())
SETTINGS = {
    "model-control-mode": "explicit",
    "grace-seconds": str(LONG_SECONDS),
    "load-seconds": str(LONG_SECONDS),
    "http-idle-seconds": str(LONG_SECONDS),
    "trace-mode": "opentelemetry",
    "trace-rate": "1",
}


TOKEN, RARE = new_token(), new_token()
ONE_A_DAY = {"requests_per_second": 1 / DAY, "burst": 1}


def signed(now: float, seconds: float) -> str:
    """Return a token that is valid for `seconds` from `now`."""
    claims = {"iss": "i", "aud": "a", "sub": "alice", "nbf": int(now), "exp": int(now + seconds)}
    return jwt.encode(claims, KEY, "ES256", {"kid": "k"})


def write_rules(directory: Path) -> Path:
    """Write rules: TOKEN may do everything, alice little; RARE has a tight daily quota."""
    public = ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
    (directory / "keys").write_text(json.dumps({"keys": [{**public, "kid": "k"}]}))
    everything = ["infer", "manage", "metadata", "metrics", "page", "health"]
    rules = {
        "signed_tokens": {"keys": str(directory / "keys"), "issuer": "i", "audience": "a"},
        "caller": [
            {"name": "all", "token": digest_of(TOKEN), "allow": everything},
            {"name": "people", "subject": "*", "allow": ["metadata"]},
            {"name": "rare", "token": digest_of(RARE), "allow": ["metadata"], **ONE_A_DAY},
        ],
    }
    (directory / "rules.json").write_text(json.dumps(rules))
    return directory / "rules.json"


def asked(path: str, body: Any = None, token: str = TOKEN) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    shown = ("authorization", f"Bearer {token}")
    return message("GET" if body is None else "POST", path, shown, body=data)


def infer(model: str, **parameters: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}
    return asked(f"/v2/models/{model}/infer", {"inputs": [tensor], "parameters": parameters})


def pending(metrics: str) -> int:
    rows = re.findall(r"^nv_inference_pending_request_count{.*} (\S+)$", metrics, re.M)
    return sum(int(float(row)) for row in rows)


def near(one: float, other: float) -> bool:
    return abs(one - other) < LONG_SECONDS


def durations(text: str) -> list[float]:
    """Return all sums and gauges of durations in the metrics, in seconds."""
    found = re.findall(r"^(\w*_(?:seconds|us)(?:_sum)?)(?:{.*})? (\S+)$", text, re.M)
    limits = ("limit", "timeout", "process_start_time", "cpu")
    return [
        float(value) / (1e6 if "_us" in name else 1)
        for name, value in found
        if not any(one in name for one in limits)
    ]


@pytest.mark.parametrize("jump", [-HOUR, DAY], ids=["back", "forward"])
async def test_only_credentials_and_what_is_told_follow_the_clock(
    tmp_path: Path, jump: int
) -> None:
    """Queues, deadlines, loads, quotas, connections, durations and the drain do not."""
    models, gate, last = tmp_path / "models", tmp_path / "gate", tmp_path / "last-gate"
    code = {
        "held": GATED.format(load="", infer=str(gate)),
        "apart": GATED.format(load="", infer=str(gate)),
        "late": GATED.format(load=str(gate), infer=""),
        "last": GATED.format(load="", infer=str(last)),
    }
    for name, text in code.items():
        more = PROCESS if name == "apart" else ""
        write(models, name, text, VECTORS + QUEUED + more)
    log = tmp_path / "access.jsonl"
    settings = {
        **SETTINGS,
        "access-rules": str(write_rules(tmp_path)),
        "access-log": str(log),
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
    for name in ("held", "apart", "last"):
        flags += ["--load-model", name]
    with collecting() as collector, wall(tmp_path) as clock:
        variables = {**clock.variables, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        async with AsyncExitStack() as stack, asyncio.timeout(START_SECONDS):
            flags += ["--allow-python-models"]
            server = await stack.enter_async_context(served(models, *flags, **variables))

            async def connected() -> Connection:
                return await stack.enter_async_context(connect(server.http))

            async def begin(request: bytes) -> Connection:
                client = await connected()
                await client.send(request)
                return client

            async def status(request: bytes) -> int:
                return (await (await connected()).ask(request)).status

            client = await connected()
            before = signed(clock.time(), LONG_SECONDS)
            known = asked("/v2/models/held", token=before)
            assert 200 == (await client.ask(known)).status
            assert [200, 429] == [await status(asked("/v2/models/held", token=RARE)) for _ in "12"]
            waiting = [await begin(infer("held"))]
            await until(Path(f"{gate}-begun").exists)
            limit = LONG_SECONDS * 1_000_000
            waiting += [await begin(infer("held", timeout=limit)), await begin(infer("apart"))]
            load = await begin(asked("/v2/repository/models/late/load", {}))
            while not pending((await client.ask(asked("/metrics"))).body.decode()):
                await asyncio.sleep(0.01)

            clock.jump(jump)

            expired = await (await begin(infer("held", timeout=1000))).answer()
            late_token = signed(clock.time(), LONG_SECONDS)
            found = {
                "known before": (await client.ask(known)).status,
                "of another connection": await status(known),
                "valid from now on": await status(asked("/v2/models/held", token=late_token)),
                "no longer valid": await status(
                    asked("/v2/models/held", token=signed(clock.time() - DAY, HOUR))
                ),
            }
            quota = await client.ask(asked("/v2/models/held", token=RARE))
            is_ready = await status(asked("/v2/health/ready"))
            gate.touch()
            answers = [(await one.answer()).status for one in (*waiting, load)]
            told = await client.ask(asked("/v2/models/held"))
            loaded = (await client.ask(asked("/v2/repository/models/held/load", {}))).status
            metrics = (await client.ask(asked("/metrics"))).body.decode()
            events = (await client.ask(asked("/page/events"))).json["events"]
            stopping = await begin(infer("last"))
            await until(Path(f"{last}-begun").exists)
            server.process.send_signal(signal.SIGTERM)
            await server.until("shutting down")
            last.touch()
            ended = (await stopping.answer()).status, await server.ended()

        is_back = jump < 0
        assert 503 == expired.status, expired
        assert {
            "known before": 200 if is_back else 401,
            "of another connection": 200 if is_back else 401,
            "valid from now on": 200,
            "no longer valid": 401,
        } == found
        assert 429 == quota.status
        assert 0 < int(quota.headers["retry-after"]) <= DAY
        assert (200, 200) == (is_ready, loaded)
        assert [200] * 4 == answers
        assert (200, 0) == ended
        now = clock.time()
        assert near(parsedate_to_datetime(told.headers["date"]).timestamp(), now)
        assert durations(metrics)
        assert all(0 <= one < LONG_SECONDS for one in durations(metrics))
        numbers = [event["number"] for event in events]
        assert sorted(numbers, reverse=True) == numbers
        assert near(events[0]["at_ns"] / 1e9, now)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert all(0 <= line["total_us"] < LONG_SECONDS * 1e6 for line in lines)
        spans = collector.spans
        lasted = [one.end_time_unix_nano - one.start_time_unix_nano for one in spans]
        assert lasted
        assert all(0 <= one < LONG_SECONDS * 1e9 for one in lasted)
