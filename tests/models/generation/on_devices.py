"""Loads a generator on one device and split over two, and prints the results as JSON.

Runs as a separate process: JAX fixes the number of CPU devices when it starts.
"""

import json
import sys
from pathlib import Path
from typing import Any, TypedDict

import structlog
from support.generators import CONFIG, Loaded, prompt_of

from xlaserve.errors import InvalidModel
from xlaserve.generation.loading import GeneratorModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import jax_runtime, sites
from xlaserve.runtime.load_context import LoadContext

RULES: dict[str, list[str | None]] = {
    "layers/*/[qkv]": [None, "model"],
    "layers/*/o": ["model", None],
    "cache/*": [None, "model"],
}
POSITIONS: dict[str, list[str | None]] = {"cache/*": [None, None, "model"]}
REFUSED: dict[str, dict[str, list[str | None]]] = {
    "slots": {"cache/*": ["model"]},
    "name": {"cache/9": [None, "model"]},
    "axis": {"cache/*": [None, "heads"]},
}
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 12, "ignore_eos": True},
    {"max_tokens": 12, "ignore_eos": True, "temperature": 1.5, "seed": 3},
]


class Seen(TypedDict):
    """The results of a placement."""

    tokens: list[list[int]]
    step_sizes: list[int]
    """Step sizes smaller than the number of slots."""
    alone: bool
    """Whether steps of one row were executed."""
    parameters_bytes: int
    states_bytes: int
    total_bytes: int
    per_device: dict[str, int]
    predicted: dict[str, int]
    cache: list[list[int]]
    """The shape of one shard of each array of the cache."""


def config_of(rules: dict[str, list[str | None]] | None) -> ModelConfig:
    """Return the configuration for one device, or for two with sharding rules."""
    split = {"devices": "all", "placement": "shard", "partition": json.dumps(rules)}
    return ModelConfig(parameters=CONFIG | (split if rules else {}))


def load(directory: Path, rules: dict[str, list[str | None]] | None) -> GeneratorModel:
    """Load with sharding rules, or on the first device."""
    model = loaders.load(directory, LoadContext("story", "1", config_of(rules)))
    assert isinstance(model, GeneratorModel)
    return model


def look(directory: Path, rules: dict[str, list[str | None]] | None) -> Seen:
    """Run two requests concurrently, then close the model."""
    model = load(directory, rules)
    loaded = Loaded(model)
    asked = [loaded.ask(prompt_of(9, 9), **one) for one in ASKED]
    for one in asked:
        assert one.over.wait(60)
    before, rows = model.counts.steps, model.counts.step_rows
    asked.append(loaded.ask(prompt_of(7, 2), **ASKED[1]))
    assert asked[-1].over.wait(60)
    loaded.wait_until_idle()
    alone = model.counts.steps - before == model.counts.step_rows - rows
    memory = model.info.memory
    seen = Seen(
        tokens=[one.tokens for one in asked],
        step_sizes=list(model.generation.step_sizes),
        alone=alone,
        parameters_bytes=memory.parameters_bytes,
        states_bytes=memory.states_bytes,
        total_bytes=memory.total_bytes,
        per_device=dict(memory.per_device),
        predicted=loaders.predict_size(directory, config_of(rules), sites.devices("cpu")),
        cache=[list(array.addressable_shards[0].data.shape) for array in model._programs._cache],
    )
    model.close()
    return seen


def refusal(directory: Path, rules: dict[str, list[str | None]]) -> str:
    """Return why a load with these rules was refused."""
    try:
        load(directory, rules).close()
    except InvalidModel as error:
        return str(error)
    return ""


def main(directory: Path) -> None:
    """Print the results of each placement by name."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    jax_runtime.start("cpu")
    found = {
        "one": look(directory, None),
        "two": look(directory, RULES),
        "positions": look(directory, POSITIONS),
        "refused": {name: refusal(directory, rules) for name, rules in REFUSED.items()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
