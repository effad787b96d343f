"""torch.export programs give the same outputs as PyTorch."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from support.pt2_models import answers, path

from xlaserve.importers.pt2 import archive, importing
from xlaserve.importers.pt2.importing import Options
from xlaserve.importers.pt2.inputs import resolve
from xlaserve.tensors import Tensor

BF16, FP16, FP32 = 2e-2, 2e-3, 1e-5


def answered(name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    read = archive.open_file(path(name))
    dimensions = {s: [7] for s in read.program.ranges if read.program.ranges[s] == (2, 12)}
    made = importing.exportable(read, resolve(read.program, dimensions, None), Options())
    found = jax.jit(made.fn)(made.params, *inputs)
    assert isinstance(found, dict)
    return list(map(np.asarray, found.values()))


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("by-number", FP32),
        ("fixed", FP32),
        ("in-place", FP32),
        ("mlp", FP32),
        ("mlp-bf16", BF16),
        ("mlp-fp16", FP16),
        ("transformer", FP32),
        ("convnet", FP32),
        ("convnet-decomposed", FP32),
        ("in-place-decomposed", FP32),
        ("transformer-decomposed", FP32),
    ],
)
def test_a_program_answers_as_pytorch_did(name: str, tolerance: float) -> None:
    inputs, expected = answers(name)
    read = archive.open_file(path(name)).program
    dtypes = [read.graph.tensors[key].dtype for key in read.inputs]
    given = [value.astype(dtype) for value, dtype in zip(inputs, dtypes, strict=True)]

    found = answered(name, given)

    assert len(expected) == len(found)
    for want, got in zip(expected, found, strict=True):
        difference = np.abs(got.astype(np.float64) - want).max()
        assert difference <= tolerance * np.abs(want).max()
