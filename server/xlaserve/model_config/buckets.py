"""Chooses the batch sizes (buckets) that a model is compiled for."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import betterproto

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve_proto import inference

DEFAULT_MAX_BATCH_SIZE = 64
"""Default maximum batch size, which gives 12 buckets."""

MAX_BATCH_SIZE = 65_536
"""Maximum value of max_batch_size, which gives 32 buckets."""

MAX_BUCKETS = 64
"""Maximum number of configured batch sizes."""

FIXED = 0
"""The only bucket of a model without a batch dimension."""

BATCH_SIZES = "batch_sizes"
"""Name of the parameter that lists the buckets: "1,8,32"."""

BATCH_INDEPENDENT = "batch_independent"
"""Name of the parameter that declares whether rows are computed independently of each other."""

SPLIT_BATCHES = "split_batches"
"""Name of the parameter that allows executing a batch in pieces on the CPU."""

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The batch sizes that a model is compiled for."""

    sizes: tuple[int, ...]
    """Batch sizes in ascending order."""
    independent: bool = True
    """Whether requests may be batched and padded."""

    @property
    def is_batched(self) -> bool:
        """Tell whether the model has a batch dimension."""
        return self.sizes != (FIXED,)

    @property
    def first(self) -> tuple[int, ...]:
        """Return the sizes compiled before the first request, which suffice for any request."""
        return self.sizes if not self.independent else tuple(dict.fromkeys(self._ends))

    @property
    def rest(self) -> tuple[int, ...]:
        """Return the other sizes, the most useful ones first."""
        return by_benefit(self.first, (size for size in self.sizes if size not in self.first))

    @property
    def _ends(self) -> tuple[int, int]:
        return self.sizes[0], self.sizes[-1]


def plan(max_batch_size: int, config: ModelConfig) -> BucketPlan:
    """Return the configured buckets of a model; raises InvalidModel.

    By default they are the powers of two and their midpoints, which `batch_sizes` replaces. The
    `preferred_batch_size` and `max_batch_size` are added. If rows depend on one another, every size
    up to the maximum is a bucket.
    """
    if declared(config) is False:
        return BucketPlan(_every_size(max_batch_size, config), independent=False)
    batch_sizes, preferred = _listed(config), _preferred(config)
    if not max_batch_size:
        if batch_sizes:
            raise InvalidModel(f"parameter '{BATCH_SIZES}': the model has no batch dimension")
        return BucketPlan((FIXED,))
    for name, sizes in ((BATCH_SIZES, batch_sizes), ("preferred_batch_size", preferred)):
        for size in sizes:
            if not 1 <= size <= max_batch_size:
                raise InvalidModel(f"{name}: expected 1 to {max_batch_size}, got {size}")
    found = {*(batch_sizes or buckets_up_to(max_batch_size)), *preferred, max_batch_size}
    if len(found) > MAX_BUCKETS:
        raise InvalidModel(f"expected at most {MAX_BUCKETS} batch sizes, got {len(found)}")
    return BucketPlan(tuple(sorted(found)))


def exact(max_batch_size: int, config: ModelConfig) -> tuple[int, ...]:
    """Return the batch sizes compiled with the load if each size needs its own program.

    These are the ones in `batch_sizes`, or 1; others are compiled on demand. Raises InvalidModel.
    """
    batch_sizes = _listed(config) or (1,)
    most = max_batch_size or MAX_BATCH_SIZE
    if len(batch_sizes) > MAX_BUCKETS or not all(1 <= size <= most for size in batch_sizes):
        raise InvalidModel(
            f"{BATCH_SIZES}: expected at most {MAX_BUCKETS} sizes of 1 to {most}, got"
            f" '{config.parameters[BATCH_SIZES][:64]}'"
        )
    return tuple(sorted(set(batch_sizes)))


def buckets_up_to(max_batch_size: int) -> tuple[int, ...]:
    """Return powers of two and their midpoints, 1 2 3 4 6 8 12 16 24 ..., and the maximum itself.

    This takes two programs per doubling, and pads no batch by more than half of its rows.
    """
    sizes = {max_batch_size}
    power = 1
    while power < max_batch_size:
        sizes |= {power, power + power // 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= max_batch_size))


def by_benefit(compiled: Iterable[int], missing: Iterable[int]) -> tuple[int, ...]:
    """Order missing buckets so that each one saves the most padding, given the ones before it.

    Batch sizes are assumed to be uniformly distributed on a logarithmic scale. A new bucket takes
    the batches between it and the next smaller one, which the next larger one would have padded.
    The largest bucket must be among the compiled ones.
    """
    have, left, order = sorted(compiled), set(missing), list[int]()

    def saved(size: int) -> float:
        index = bisect_left(have, size)
        below = have[index - 1] if index else 0.5
        return (have[index] - size) * log(size / below)

    while left:
        best = max(sorted(left), key=saved)
        left.remove(best)
        have.insert(bisect_left(have, best), best)
        order.append(best)
    return tuple(order)


def declared(config: ModelConfig) -> bool | None:
    """Return whether the configuration declares rows independent, or None if it does not say.

    Raises InvalidModel.
    """
    return _boolean(config, BATCH_INDEPENDENT)


def may_split(config: ModelConfig) -> bool:
    """Tell whether batches may be executed in pieces; raises InvalidModel."""
    return _boolean(config, SPLIT_BATCHES) is not False


def _boolean(config: ModelConfig, name: str) -> bool | None:
    text = config.parameters.get(name)
    if text is None:
        return None
    word = text.strip().lower()
    if word not in _BOOLEANS:
        raise InvalidModel(f"parameter '{name}': expected true or false, got '{word[:64]}'")
    return _BOOLEANS[word]


def _every_size(max_batch_size: int, config: ModelConfig) -> tuple[int, ...]:
    if BATCH_SIZES in config.parameters:
        raise InvalidModel(
            f"parameter '{BATCH_SIZES}': not available for a model whose rows depend on one"
            " another, which is compiled for every size"
        )
    if max_batch_size > MAX_BUCKETS:
        raise InvalidModel(
            f"max_batch_size: expected at most {MAX_BUCKETS} for a model whose rows depend on one"
            f" another, since every size is compiled, got {max_batch_size}"
        )
    return tuple(range(1, max_batch_size + 1)) or (FIXED,)


def _listed(config: ModelConfig) -> tuple[int, ...]:
    text = config.parameters.get(BATCH_SIZES)
    if text is None:
        return ()
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise InvalidModel(
            f"parameter '{BATCH_SIZES}': expected sizes like \"1,8,32\", got '{text[:64]}'"
        ) from None


def _preferred(config: ModelConfig) -> tuple[int, ...]:
    if config.message is None:
        return ()
    if config.sequence_batching is not None:
        return config.sequence_batching.preferred_batch_size
    _, scheduling = betterproto.which_one_of(config.message, "scheduling_choice")
    if not isinstance(scheduling, inference.ModelDynamicBatching):
        return ()
    return tuple(scheduling.preferred_batch_size)
