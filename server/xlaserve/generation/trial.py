"""Trials at load time, which enable optimisations that models do not promise to allow.

What is kept of a prompt is of use to another one only where the rows of a slot are functions of the
tokens up to them alone. A model whose rows hold something else, such as how long its prompt is,
answers wrongly behind rows that it did not compute itself. And a step of fewer rows than slots
gives `decode` a cache that ends with the window: a model whose arithmetic depends on how many
positions there are, such as frequencies for long caches, answers something else then.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from xlaserve.generation.batch import Computes
from xlaserve.generation.sampling import INTEGERS, REALS
from xlaserve.runtime.generator.info import GenerationInfo

_KEPT, _BEHIND, _STEPS = 5, 3, 3
"""Kept rows, rows left by another prompt after them, and compared steps."""
_TOLERANCE = 0.05
"""Allowed difference of log-probabilities, for another order of additions."""
_PARTIAL = 2
"""Compared smaller steps: the second one reads the first one's rows."""


def rows_are_of_their_tokens(programs: Computes, info: GenerationInfo) -> bool:
    """Tell whether steps behind kept rows give what they give behind rows that are computed again.

    True without a trial where a slot has hardly any positions. The cache is empty afterwards.
    """
    kept, behind = min(_KEPT, info.chunk), min(_BEHIND, info.chunk)
    window = next((w for w in info.windows if w >= kept + behind + _STEPS), None)
    if window is None:
        return True
    begins = [7 * index + 1 for index in range(kept)]
    following = [5 * index + 2 for index in range(_STEPS)]
    try:
        programs.reset()
        _prefill(programs, info, window, begins, 0)
        alone = _steps(programs, info, window, following, kept)
        programs.reset()
        _prefill(programs, info, window, begins, 0)
        _prefill(programs, info, window, [11 * index + 3 for index in range(behind)], kept)
        _steps(programs, info, window, following[::-1], kept + behind)
        again = _steps(programs, info, window, following, kept)
    finally:
        programs.reset()
    return all(_are_same(*pair) for pair in zip(alone, again, strict=True))


def steps_are_alike(programs: Computes, info: GenerationInfo) -> bool:
    """Tell whether steps of fewer rows give what those of all slots give, in every window.

    At the end of each, where the arithmetic of positions differs most. Each size has a slot of its
    own, after the first, which has the steps of all. The cache is empty afterwards.
    """
    if not info.step_sizes:
        return True
    try:
        return all(_window_is_alike(programs, info, w) for w in info.windows if w > _PARTIAL)
    finally:
        programs.reset()


def _window_is_alike(programs: Computes, info: GenerationInfo, window: int) -> bool:
    count = min(info.chunk, window - _PARTIAL)
    start = window - _PARTIAL - count
    tokens = [7 * index + 1 for index in range(count)]
    following = [5 * index + 2 for index in range(_PARTIAL)]
    programs.reset()
    found = []
    for slot, size in enumerate((None, *info.step_sizes)):
        _prefill(programs, info, window, tokens, start, slot=slot)
        found.append(_steps(programs, info, window, following, start + count, slot=slot, size=size))
    return all(
        _are_same(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True)
    )


def _prefill(
    programs: Computes,
    info: GenerationInfo,
    window: int,
    tokens: Sequence[int],
    start: int,
    *,
    slot: int = 0,
) -> None:
    part = np.zeros(info.chunk, np.int32)
    part[: len(tokens)] = np.array(tokens) % info.vocab
    programs.prefill(window, part, slot, start, len(tokens))


def _steps(
    programs: Computes,
    info: GenerationInfo,
    window: int,
    tokens: Sequence[int],
    start: int,
    *,
    slot: int = 0,
    size: int | None = None,
) -> list[Mapping[int, float]]:
    """Return the likeliest tokens behind each of some tokens, with their log-probabilities.

    `size` is the rows of the steps; None for all slots.
    """
    slots, row = None, slot
    if size is not None:
        slots, row = np.full(size, info.slots, np.int32), 0
        slots[0] = slot
    integers = np.zeros((size or info.slots, len(INTEGERS)), np.int32)
    integers[:, 1] = info.max_length
    reals = np.ones((len(integers), len(REALS)), np.float32)
    found: list[Mapping[int, float]] = []
    for index, token in enumerate(tokens):
        integers[row, :3] = token % info.vocab, start + index, 1
        step = programs.step(window, integers, reals, slots=slots)
        pair = step.top_tokens[row].tolist(), step.top_logprobs[row].tolist()
        found.append(dict(zip(*pair, strict=True)))
    return found


def _are_same(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Compare log-probabilities; a token of one list alone must be as unlikely as the last."""
    floors = min(one.values()), min(other.values())
    pairs = [(one.get(t, floors[0]), other.get(t, floors[1])) for t in {*one, *other}]
    return all(a == b or abs(a - b) <= _TOLERANCE for a, b in pairs)
