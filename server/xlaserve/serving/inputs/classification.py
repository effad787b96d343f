"""Classification extension: the best classes of an output, as texts `value:index[:label]`."""

from collections.abc import Sequence

import numpy as np

from xlaserve.errors import InvalidTensor
from xlaserve.serving.inference import InferOutput
from xlaserve.tensors import BYTES, Tensor, TensorSpec

MOST_ELEMENTS = 1_000_000
"""Maximum number of elements in a classified output: about 10 ms on the event loop."""
MOST_CLASSES = 16_384
"""Maximum number of returned classes over all rows, for the same reason."""


def check_classes(model: str, spec: TensorSpec) -> None:
    """Raise InvalidTensor for outputs that are not numeric."""
    if not spec.datatype.is_number:
        got = f"{spec.datatype}"
        raise InvalidTensor(model, "output", spec.name, "numbers to be classified", got)


def classified(
    model: str, output: InferOutput, count: int, labels: Sequence[bytes], *, batched: bool
) -> InferOutput:
    """Return the best classes of an output, or of each row in a batch, in descending order.

    Ties are in index order, and NaN is last. `labels` are by class index. Raises InvalidTensor for
    outputs too large to classify on the event loop.
    """
    scores = output.data
    rows = scores.shape[0] if batched and scores.ndim else 0
    table = scores.reshape(max(rows, 1) if scores.size else 0, -1) if scores.size else None
    width = 0 if table is None else table.shape[1]
    count = min(count, width)
    for most, unit, have in (
        (MOST_ELEMENTS, "elements", scores.size),
        (MOST_CLASSES, "classes", max(rows, 1) * count),
    ):
        if have > most:
            expected = f"at most {most} {unit} for a classification"
            raise InvalidTensor(model, "output", output.name, expected, str(have))
    texts = [] if table is None else [text for row in table for text in _best(row, count, labels)]
    shape = (rows, count) if batched and scores.ndim else (count,)
    data = np.fromiter(texts, BYTES.dtype, len(texts)).reshape(shape)
    return InferOutput(output.name, BYTES, data)


def _best(scores: Tensor, count: int, labels: Sequence[bytes]) -> list[bytes]:
    is_whole = scores.dtype.kind in "iu"
    numbers = scores if is_whole else scores.astype(np.float64)
    written = "%d:%d" if is_whole else "%f:%d"
    texts = []
    for index in _order(numbers, count):
        text = (written % (numbers[index], index)).encode()
        label = labels[index] if index < len(labels) else b""
        texts.append(text + b":" + label if label else text)
    return texts


def _order(numbers: Tensor, count: int) -> list[int]:
    """Return the indices of the best scores without sorting all of them."""
    if numbers.dtype.kind == "f":
        numbers = np.where(np.isnan(numbers), -np.inf, numbers)
    candidates = np.arange(len(numbers))
    if 0 < count < len(numbers) // 8:
        least = np.partition(numbers, len(numbers) - count)[len(numbers) - count]
        candidates = np.flatnonzero(numbers >= least)
    # Stable sort of the reversed array, reversed again: descending, with ties in index order.
    ascending = np.argsort(numbers[candidates][::-1], kind="stable")
    order = candidates[::-1][ascending][::-1]
    return [int(index) for index in order[:count]]
