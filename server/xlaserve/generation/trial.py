"""Trials at load time, which detect models that break the assumptions of optimizations.

Prefix reuse assumes that a cached row depends only on the tokens up to it. A model whose rows
depend on anything else, such as the length of the prompt, would give wrong answers. Partial steps
call `decode` with a cache that ends at the window: a model whose arithmetic depends on the number
of positions, such as scaled frequencies for long caches, would give different answers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from xlaserve.generation.batch import Computes
from xlaserve.generation.sampling import INTEGERS, REALS
from xlaserve.runtime.generator.info import GenerationInfo

_KEPT, _BEHIND, _STEPS = 5, 3, 3
"""Numbers of reused rows, of another prompt's rows after them, and of steps to compare."""
_TOLERANCE = 0.05
"""Allowed difference of log-probabilities, since additions may be reordered."""
_PARTIAL = 2
"""Number of compared partial steps; the second reads the row written by the first."""


def rows_are_of_their_tokens(programs: Computes, info: GenerationInfo) -> bool:
    """Tell whether steps after reused rows give the same results as after recomputed rows.

    Returns True without a trial if the cache has too few positions. Leaves the cache empty.
    """
    kept, written = min(_KEPT, info.chunk), min(_BEHIND, info.chunk)
    window = next((w for w in info.windows if w >= kept + written + _STEPS), None)
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
        _prefill(programs, info, window, [11 * index + 3 for index in range(written)], kept)
        _steps(programs, info, window, following[::-1], kept + written)
        again = _steps(programs, info, window, following, kept)
    finally:
        programs.reset()
    return all(_are_same(*pair) for pair in zip(alone, again, strict=True))


def steps_are_alike(programs: Computes, info: GenerationInfo) -> bool:
    """Tell whether partial steps give the same results as full steps, in every window.

    Tests the end of each window, where position arithmetic differs most. Each step size uses its
    own slot; slot 0 is for full steps. Leaves the cache empty.
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
    """Return the most likely tokens after each of the tokens, with their log-probabilities.

    `size` is the number of rows of partial steps; None for full steps.
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
    """Compare log-probabilities; tokens missing in a list count as its least likely one."""
    floors = min(one.values()), min(other.values())
    pairs = [(one.get(t, floors[0]), other.get(t, floors[1])) for t in {*one, *other}]
    return all(a == b or abs(a - b) <= _TOLERANCE for a, b in pairs)
