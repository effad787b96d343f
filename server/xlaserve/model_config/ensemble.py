"""Validates the graph of an ensemble's steps, and sorts them."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from xlaserve.model_config.config import EnsembleStep
from xlaserve.model_config.schema import BadConfig, shown


def in_order(
    steps: Sequence[EnsembleStep], inputs: Iterable[str], outputs: Iterable[str]
) -> tuple[EnsembleStep, ...]:
    """Sort the steps topologically; independent steps keep their order.

    Raises BadConfig for a cycle, and for a tensor with no producer or with several.
    """
    made_by = _makers(steps, frozenset(inputs))
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for index, step in enumerate(steps):
        sources = [_maker(made_by, tensor, _called(steps, index)) for tensor in _tensors_read(step)]
        sorter.add(index, *(source for source in sources if source is not None))
    for tensor in outputs:
        if _maker(made_by, tensor, "the ensemble's output") is None:
            raise BadConfig(f"tensor {shown(tensor)} is both an input and an output")
    return tuple(steps[index] for index in _sorted(sorter, steps))


def _tensors_read(step: EnsembleStep) -> Iterable[str]:
    return step.input_map.values()


def _called(steps: Sequence[EnsembleStep], index: int) -> str:
    return f"step {index} ({shown(steps[index].model_name)})"


def _makers(steps: Sequence[EnsembleStep], inputs: frozenset[str]) -> dict[str, int | None]:
    """Return the step that produces each tensor, or None for an input of the ensemble."""
    made_by: dict[str, int | None] = dict.fromkeys(inputs)
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in made_by:
                first = made_by[tensor]
                other = "an input" if first is None else _called(steps, first)
                raise BadConfig(
                    f"tensor {shown(tensor)} has two sources: {other} and {_called(steps, index)}"
                )
            made_by[tensor] = index
    return made_by


def _maker(made_by: Mapping[str, int | None], tensor: str, taker: str) -> int | None:
    if tensor not in made_by:
        raise BadConfig(
            f"tensor {shown(tensor)} of {taker} is neither an input nor an output of a step"
        )
    return made_by[tensor]


def _sorted(sorter: TopologicalSorter[int], steps: Sequence[EnsembleStep]) -> Iterable[int]:
    try:
        sorter.prepare()
    except CycleError as error:
        names = " -> ".join(_called(steps, index) for index in error.args[1][:8])
        raise BadConfig(f"the steps form a cycle: {names}") from None
    ready: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
        # Take the first ready step in configured order, so that a valid order does not change.
        index = heapq.heappop(ready)
        yield index
        sorter.done(index)
