"""Splits the inputs of an embedding request into executions by padded length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.tensors import Tensor, TensorSpec

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Inputs of a request that share one execution."""

    places: tuple[int, ...]
    """Indexes of the inputs in the request."""
    length: int
    """Padded length in tokens."""

    def input_bytes(self, info: EmbeddingInfo) -> int:
        """Return the total size of the input tensors in bytes."""
        each = sum(spec.datatype.itemsize for spec in _specs(info))
        return len(self.places) * self.length * each


def parts_of(counts: Sequence[int], info: EmbeddingInfo, most_rows: int) -> Sequence[Part]:
    """Split inputs into executions of at most this many rows, grouped by padded length.

    Short inputs are not padded to the length of long ones. Order is kept within a length.
    """
    by_length: dict[int, list[int]] = {}
    for place, count in enumerate(counts):
        by_length.setdefault(info.length_for(count), []).append(place)
    return [
        Part(tuple(places[start : start + most_rows]), length)
        for length, places in sorted(by_length.items())
        for start in range(0, len(places), most_rows)
    ]


def tensors(part: Part, inputs: Sequence[Ids], info: EmbeddingInfo) -> Mapping[str, Tensor]:
    """Return an execution's input tensors: padded token ids and the attention mask."""
    shape = (len(part.places), part.length)
    found = {spec.name: np.zeros(shape, spec.datatype.dtype) for spec in _specs(info)}
    tokens = found[info.tokens.name]
    if info.pad:
        tokens[:] = info.pad
    mask = None if info.mask is None else found[info.mask.name]
    for row, place in enumerate(part.places):
        ids = inputs[place]
        tokens[row, : len(ids)] = ids
        if mask is not None:
            mask[row, : len(ids)] = 1
    return found


def cut(embeddings: Tensor, size: int) -> Tensor:
    """Truncate each embedding to this size and normalize it to length 1; [rows, size] FP32."""
    if embeddings.shape[1] == size:
        return embeddings
    found = embeddings[:, :size]
    # Avoid a division by zero: an all-zero row stays zero.
    norms = np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return np.ascontiguousarray(found / norms, np.float32)


def _specs(info: EmbeddingInfo) -> Sequence[TensorSpec]:
    return [spec for spec in (info.tokens, info.mask, info.types) if spec is not None]
