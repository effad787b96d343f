"""The batch sizes that a model is compiled for."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import betterproto

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve_proto import inference

DEFAULT_MAX_BATCH_SIZE = 64
"""Default largest batch; 12 buckets."""

MAX_BATCH_SIZE = 65_536
"""Limit of a model's batch size; 32 buckets."""

MAX_BUCKETS = 64
"""Limit of configured batch sizes."""

FIXED = 0
"""The only bucket of a model without batching."""

BATCH_SIZES = "batch_sizes"
"""The parameter of a configuration that lists the buckets: "1,8,32"."""

BATCH_INDEPENDENT = "batch_independent"
"""The parameter that declares whether each row of a batch is computed from itself alone."""

SPLIT_BATCHES = "split_batches"
"""Parameter that allows executing a batch in pieces on the CPU."""

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The sizes compiled for a model."""

    sizes: tuple[int, ...]
    """Ascending."""
    independent: bool = True
    """Whether rows may be padded and requests batched."""

    @property
    def is_batched(self) -> bool:
        """Tell whether a program is for a number of rows, rather than for a whole shape."""
        return self.sizes != (FIXED,)

    @property
    def first(self) -> tuple[int, ...]:
        """Return the sizes needed before the first request: they serve everything."""
        return self.sizes if not self.independent else tuple(dict.fromkeys(self._ends))

    @property
    def rest(self) -> tuple[int, ...]:
        """Return the remaining sizes, the most useful first."""
        return by_benefit(self.first, (size for size in self.sizes if size not in self.first))

    @property
    def _ends(self) -> tuple[int, int]:
        return self.sizes[0], self.sizes[-1]


def plan(max_batch_size: int, config: ModelConfig) -> BucketPlan:
    """Return the buckets of a model as its configuration wants them; raises InvalidModel.

    `batch_sizes` replaces the powers of two and their midpoints, `preferred_batch_size` of
    dynamic_batching adds to either, and so does `max_batch_size`. Rows that depend on one another
    take every size there is.
    """
    if declared(config) is False:
        return BucketPlan(_every_size(max_batch_size, config), independent=False)
    asked, preferred = _listed(config), _preferred(config)
    if not max_batch_size:
        if asked:
            raise InvalidModel(f"parameter '{BATCH_SIZES}': the model has no batch dimension")
        return BucketPlan((FIXED,))
    for name, sizes in ((BATCH_SIZES, asked), ("preferred_batch_size", preferred)):
        for size in sizes:
            if not 1 <= size <= max_batch_size:
                raise InvalidModel(f"{name}: expected 1 to {max_batch_size}, got {size}")
    found = {*(asked or buckets_up_to(max_batch_size)), *preferred, max_batch_size}
    if len(found) > MAX_BUCKETS:
        raise InvalidModel(f"expected {MAX_BUCKETS} batch sizes at most, got {len(found)}")
    return BucketPlan(tuple(sorted(found)))


def exact(max_batch_size: int, config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of rows that a load compiles where each has a program of its own.

    One row, or those of `batch_sizes`; others follow on demand. Raises InvalidModel.
    """
    asked = _listed(config) or (1,)
    most = max_batch_size or MAX_BATCH_SIZE
    if len(asked) > MAX_BUCKETS or not all(1 <= size <= most for size in asked):
        raise InvalidModel(
            f"{BATCH_SIZES}: expected {MAX_BUCKETS} sizes of 1 to {most} at most, "
            f"got '{config.parameters[BATCH_SIZES][:64]}'"
        )
    return tuple(sorted(set(asked)))


def buckets_up_to(max_batch_size: int) -> tuple[int, ...]:
    """Return powers of two and their midpoints, 1 2 3 4 6 8 12 16 24 ..., and the maximum itself.

    No request is padded by more than half of its rows, for two executables per doubling.
    """
    sizes = {max_batch_size}
    power = 1
    while power < max_batch_size:
        sizes |= {power, power + power // 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= max_batch_size))


def by_benefit(compiled: Iterable[int], missing: Iterable[int]) -> tuple[int, ...]:
    """Order buckets so that each next one saves the most rows of padding.

    As if small batches came as often as large ones, counted in doublings: the rows above the
    bucket below run in the new one, not in the one above. The largest is compiled already.
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
    """Return a configuration's declaration about rows; None to rely on the proof.

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
    said = text.strip().lower()
    if said not in _BOOLEANS:
        raise InvalidModel(f"parameter '{name}': expected true or false, got '{said[:64]}'")
    return _BOOLEANS[said]


def _every_size(max_batch_size: int, config: ModelConfig) -> tuple[int, ...]:
    if BATCH_SIZES in config.parameters:
        raise InvalidModel(
            f"parameter '{BATCH_SIZES}': a model whose rows depend on one another is compiled for "
            "every size, nothing is padded"
        )
    if max_batch_size > MAX_BUCKETS:
        raise InvalidModel(
            f"max_batch_size: expected {MAX_BUCKETS} at most for a model whose rows depend on one "
            f"another, since every size is compiled, got {max_batch_size}"
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
