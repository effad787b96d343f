"""Predicts which programs a load will compile, without importing JAX."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

from xlaserve.artifact.manifest import Manifest
from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.errors import InvalidModel
from xlaserve.model_config import buckets, compiled_shapes
from xlaserve.model_config.buckets import FIXED, BucketPlan
from xlaserve.model_config.compiled_shapes import COMPILED_SHAPES
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.verdict import Independence


@dataclass(frozen=True, slots=True)
class Serving:
    """The serving conditions that determine a model's memory."""

    platform: str = "cpu"
    config: ModelConfig = field(default_factory=ModelConfig)
    replicas: int = 1
    """Number of replicas per device."""
    in_background: bool = False
    """Whether most batch sizes are compiled after the load."""
    patience_seconds: float | None = None
    """Time limit for estimating temporaries; None for no limit."""

    @property
    def is_accelerator(self) -> bool:
        """Tell whether the platform is not the CPU."""
        return self.platform != "cpu"

    @property
    def in_flight(self) -> int:
        """Return the maximum number of concurrent executions per device."""
        return self.replicas * (IN_FLIGHT if self.is_accelerator else 1)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The programs that a load will compile."""

    count: int
    rows: int
    """The largest batch size."""
    sizes: Mapping[str, int]
    """The largest size of each other dynamic dimension, by name."""

    def shape(self, named: Sequence[str]) -> tuple[int, ...]:
        """Return the largest shape of an input, given its dimensions as sizes or names."""
        return tuple(
            int(size) if size.isdecimal() else self.sizes.get(size, self.rows) for size in named
        )


def programs(described: Manifest, serving: Serving) -> Foreseen:
    """Predict a load's programs; invalid batch sizes are replaced by the default ones."""
    config, most = serving.config, described.max_batch_size
    sizes = _sizes(described, config)
    combinations = prod(map(len, sizes.values()))
    largest = {name: max(listed) for name, listed in sizes.items()}
    most = 0 if config.is_unbatched else config.max_batch_size or most
    with suppress(InvalidModel):
        if described.is_open and _is_exact(described, config):
            rows = buckets.exact(most, config)
            return Foreseen(len(rows) * combinations, max(rows), largest)
        plan = buckets.plan(most, config)
        compiled = plan.first if serving.in_background else plan.sizes
        return Foreseen(len(compiled) * combinations, max(plan.sizes) or 1, largest)
    found = BucketPlan(buckets.buckets_up_to(most) if most else (FIXED,))
    return Foreseen(len(found.sizes) * combinations, max(found.sizes) or 1, largest)


def _is_exact(described: Manifest, config: ModelConfig) -> bool:
    """Tell whether each batch size needs its own program, according to the manifest.

    The manifest's verdict is unverified, which is sufficient for a prediction.
    """
    verdict = described.verdict
    if described.batch_independent or buckets.BATCH_INDEPENDENT in config.parameters:
        return False
    return verdict is not None and verdict.independence is not Independence.PROVED


def _sizes(described: Manifest, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the compiled sizes of dynamic dimensions other than the batch."""
    declared = config.parameters.get(COMPILED_SHAPES)
    if declared is None:
        return {name: tuple(sizes) for name, sizes in described.compiled_shapes.items() if sizes}
    names = {size for shape in described.named_shapes for size in shape[1:]}
    return compiled_shapes.parse(declared, [name for name in names if not name.isdecimal()])
