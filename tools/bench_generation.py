"""Measures the host overhead per step of a generator, with a model that computes next to nothing.

    python tools/bench_generation.py [SLOTS ...]

Requests go through the engine, without sockets. `host` is the time that the generator's thread
spends between its programs; `turn` is the whole step, including program calls and fetches. Each
figure is the best of several rounds, because machines are shared and noisy.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import xlaserve
from bench_engine import running
from xlaserve.runtime.generator.counts import CountsTokens
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.tensors import DATATYPES

VOCAB, TOKENS, ROUNDS = 64, 400, 7
PROMISED_US = 200
"""Maximum host time per step, in microseconds."""


def init_cache(params: Any, slots: int, length: int) -> Any:
    """Return a cache with one number per position."""
    return jnp.zeros((slots, length), jnp.int32)


def decode(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
    """Return logits that depend on the token alone."""
    rows = jnp.arange(tokens.shape[0])
    return params["table"][tokens], cache.at[rows, positions].set(tokens, mode="drop")


def chunk(params: Any, cache: Any, window: Any, tokens: Any, *numbers: Any) -> Any:
    """Write the tokens to the cache; return the logits after the last one."""
    slot, start, n = numbers
    positions = start + jnp.arange(tokens.shape[0])
    return params["table"][tokens[n - 1]], cache.at[slot, positions].set(tokens, mode="drop")


class Noted(InferCall):
    """A request with a future for its end."""

    takes_many = True

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Resolve the future on the last answer."""
        if last:
            self.ended.set_result(None)

    def refuse(self, error: BaseException) -> None:
        """Pass the error to the awaiting caller."""
        self.ended.set_exception(error)


def write_model(root: Path, slots: int) -> None:
    """Export the model, configured with the given number of slots."""
    table = np.random.default_rng(0).standard_normal((VOCAB, VOCAB)).astype(np.float32)
    xlaserve.export_generator(
        *(decode, chunk, init_cache, {"table": table}, root / "bare" / "1"),
        vocab=VOCAB,
        max_length=512,
        stop_tokens=[],
    )
    (root / "bare" / "config.pbtxt").write_text(
        "".join(
            f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
            for name, value in {"slots": slots, "windows": 512, "chunk": 16}.items()
        )
    )


async def measure(root: Path, slots: int) -> float:
    """Print the times of a step with all slots in use; return the host's share in microseconds."""
    prompt = np.arange(16, dtype=np.int32)
    inputs = (InferInput("tokens", DATATYPES["INT32"], prompt),)
    request = InferRequest("bare", inputs=inputs, parameters={"max_tokens": TOKENS})
    host, turns = [], []
    async with running(root, "bare") as application:
        _, instance = application.registry.resolve("bare")
        assert isinstance(instance.runner, CountsTokens)
        counts = instance.runner.counts
        for _ in range(ROUNDS):
            calls = [Noted() for _ in range(slots)]
            steps, spent, begun = counts.steps, counts.host_ns, time.perf_counter_ns()
            for call in calls:
                application.engine.begin(call, request)
            await asyncio.gather(*(call.ended for call in calls))
            steps = counts.steps - steps
            host.append((counts.host_ns - spent) / steps / 1e3)
            turns.append((time.perf_counter_ns() - begun) / steps / 1e3)
    print(f"{slots:4} slots: host {min(host):7.1f} us, turn {min(turns):7.1f} us a step")
    return min(host)


def main() -> int:
    """Measure each number of slots; return 1 if the host exceeds its limit."""
    found = []
    for slots in [int(text) for text in sys.argv[1:]] or [1, 8, 32]:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), slots)
            found.append(asyncio.run(measure(Path(directory), slots)))
    print(f"to reach: at most {PROMISED_US} us of the host")
    return int(max(found) > PROMISED_US)


if __name__ == "__main__":
    sys.exit(main())
