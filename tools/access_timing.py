"""Measure whether the timing of a refusal reveals that a model exists (docs/security.md).

    python tools/access_timing.py [--requests 4000]

A server with access rules receives requests for an existing and a missing model, alternately over
one connection: anonymously, with an unknown token, and from a caller who may use another model.
Each line has the medians in microseconds, and the share of answers for one model that took longer
than the median of the other: 50 % if the timing reveals nothing.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import numpy as np

from xlaserve.app.server import Application
from xlaserve.dialing.address import parse_address
from xlaserve.dialing.dial import dial
from xlaserve.dialing.interface import CallFailed, ServerClient
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode
from xlaserve.tensors import TensorSpec, datatype_named

_MODELS = ("secret", "absent")
"""Two models: one exists, the other does not."""
_WARM = 200
_TENSOR = {"data_type": "TYPE_FP32", "dims": [1]}
_CONFIG = {
    "backend": "identity",
    "input": [{"name": "x", **_TENSOR}],
    "output": [{"name": "y", **_TENSOR}],
}
_INPUT = (TensorSpec("x", datatype_named("FP32"), (1,)), np.ones(1, np.float32))


@asynccontextmanager
async def _serving(token: str) -> AsyncIterator[tuple[str, str]]:
    """Serve both models, with access rules, for the duration of a block; yield the addresses."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        for name in ("secret", "mine"):
            (models / name / "1").mkdir(parents=True)
            (models / name / "config.json").write_text(json.dumps(_CONFIG))
        rules = Path(folder) / "rules.json"
        allow = ["infer", "metadata", "manage"]
        caller = {"name": "c", "token": digest_of(token), "allow": allow, "models": "mine"}
        rules.write_text(json.dumps({"caller": [caller]}))
        settings = Settings.read(
            {},
            repository=models,
            access_rules=str(rules),
            grpc_endpoint="port:0",
            http_endpoint="port:0",
            model_control_mode=ModelControlMode.NONE,
            scratch_directory=Path(folder),
            device="cpu",
        )
        application = Application(settings)
        async with application.running() as addresses:
            await application.load()
            yield addresses.grpc, f"http://{addresses.http}"


async def _seconds(client: ServerClient, asks: str, model: str) -> float:
    """Return the time of one refusal."""
    began = time.perf_counter()
    try:
        if asks == "infer":
            await client.infer(model, "", [_INPUT])
        else:
            await client.tensors(model)
    except Exception as error:
        took = time.perf_counter() - began
        if not isinstance(error, CallFailed) and client.failure(error) is None:
            raise
        return took
    raise AssertionError(f"{asks} of '{model}' was not refused")


async def _measure(url: str, token: str, asks: str, count: int) -> dict[str, float]:
    times: dict[str, list[float]] = {model: [] for model in _MODELS}
    client = dial(parse_address(url, token=token), timeout=10.0)
    async with client:
        for number in range(count + _WARM):
            # Alternate the order: the first of two requests may always be faster or slower.
            for model in _MODELS if number % 2 else _MODELS[::-1]:
                took = await _seconds(client, asks, model)
                if number >= _WARM:
                    times[model].append(took)
    there, absent = (times[model] for model in _MODELS)
    middle = median(absent)
    longer = sum(took > middle for took in there) / len(there)
    return {
        "there_us": round(median(there) * 1e6, 1),
        "absent_us": round(middle * 1e6, 1),
        "longer_percent": round(100 * longer, 1),
    }


async def _main(count: int) -> None:
    token = new_token()
    async with _serving(token) as urls:
        for url in urls:
            for who, shown in (("nobody", ""), ("unknown", new_token()), ("other", token)):
                for asks in ("infer", "metadata"):
                    found = await _measure(url, shown, asks, count)
                    protocol = "rest" if url.startswith("http") else "grpc"
                    row = {"protocol": protocol, "caller": who, "asks": asks, **found}
                    print(json.dumps(row), flush=True)


def main() -> None:
    """Read the arguments and print a line of JSON for each protocol, caller and request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=4000, help="for each model")
    asyncio.run(_main(parser.parse_args().requests))


if __name__ == "__main__":
    main()
