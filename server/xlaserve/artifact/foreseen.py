"""Predicts a load's programs from manifest and configuration, without JAX."""

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
    """The facts of serving that determine a model's memory."""

    platform: str = "cpu"
    config: ModelConfig = field(default_factory=ModelConfig)
    replicas: int = 1
    """Replicas per device."""
    in_background: bool = False
    """Whether a load leaves most batch sizes for later."""
    patience_seconds: float | None = None
    """Time limit of the estimate of temporaries, or None."""

    @property
    def is_accelerator(self) -> bool:
        """Tell whether it is on no CPU."""
        return self.platform != "cpu"

    @property
    def in_flight(self) -> int:
        """Return the maximum of concurrent executions per device."""
        return self.replicas * (IN_FLIGHT if self.is_accelerator else 1)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The programs of a load."""

    count: int
    rows: int
    """The most of one of them."""
    sizes: Mapping[str, int]
    """The largest size of each other open dimension, by name."""

    def shape(self, named: Sequence[str]) -> tuple[int, ...]:
        """Return the largest shape of an input with named open sizes."""
        return tuple(
            int(size) if size.isdecimal() else self.sizes.get(size, self.rows) for size in named
        )


def programs(described: Manifest, serving: Serving) -> Foreseen:
    """Return a load's programs; a refused configuration counts as none."""
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
    """Tell whether each row count has its own program, by the export's verdict.

    The verdict of a manifest is no proof; for a guess it is good enough.
    """
    verdict = described.verdict
    if described.batch_independent or buckets.BATCH_INDEPENDENT in config.parameters:
        return False
    return verdict is not None and verdict.independence is not Independence.PROVED


def _sizes(described: Manifest, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the compiled sizes of open dimensions other than the batch."""
    said = config.parameters.get(COMPILED_SHAPES)
    if said is None:
        return {name: tuple(sizes) for name, sizes in described.compiled_shapes.items() if sizes}
    names = {size for shape in described.named_shapes for size in shape[1:]}
    return compiled_shapes.parse(said, [name for name in names if not name.isdecimal()])
