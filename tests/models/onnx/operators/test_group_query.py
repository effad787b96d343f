"""GroupQueryAttention, compared with onnxruntime, the only other implementation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from onnx import helper, numpy_helper
from support.onnx_models import ours, theirs

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.tensors import Tensor

HEADS, SHARED, SIZE = 4, 2, 32
SLOTS = {"cos": 7, "sin": 8, "positions": 9, "added": 10, "sink": 11, "k_scale": 12}


@dataclass(frozen=True)
class Call:
    """A call of the operator; `lengths` holds T - 1 for each batch entry."""

    steps: int
    lengths: tuple[int, ...]
    past: int = 0
    """Size of the given cache, or 0 without one."""
    total: int = 0
    """The total_sequence_length; 0 means the largest T."""
    is_packed: bool = False
    rotary: int = 0
    """Number of rotated pairs; 0 for no rotation."""
    has_positions: bool = False
    has_bias: bool = False
    has_sink: bool = False
    dtype: type = np.float32

    @property
    def largest(self) -> int:
        return self.total or max(self.lengths) + 1


def _given(call: Call) -> dict[str, Tensor]:
    random = np.random.default_rng(5)

    def normal(*shape: int) -> Tensor:
        return random.standard_normal(shape).astype(call.dtype)

    batch, width = len(call.lengths), (HEADS + 2 * SHARED if call.is_packed else HEADS)
    given = {"query": normal(batch, call.steps, width * SIZE)}
    if not call.is_packed:
        given["key"] = normal(batch, call.steps, SHARED * SIZE)
        given["value"] = normal(batch, call.steps, SHARED * SIZE)
    if call.past:
        given["past_key"] = normal(batch, SHARED, call.past, SIZE)
        given["past_value"] = normal(batch, SHARED, call.past, SIZE)
    given["lengths"] = np.asarray(call.lengths, np.int32)
    if call.rotary:
        angles = np.arange(40)[:, None] * 0.3 ** np.arange(call.rotary)[None, :]
        given["cos"], given["sin"] = (turn(angles).astype(call.dtype) for turn in (np.cos, np.sin))
    if call.has_positions:
        before = np.maximum(np.asarray(call.lengths) + 1 - call.steps, 0)
        given["positions"] = 3 + before[:, None] + np.arange(call.steps)[None, :]
    if call.has_bias:
        given["added"] = normal(1, HEADS, call.steps, call.largest)
    if call.has_sink:
        given["sink"] = normal(HEADS)
    return given


def _model(given: Mapping[str, Tensor], total: int, **said: Any) -> onnx.ModelProto:
    first = ("query", "key", "value", "past_key", "past_value", "lengths", "total")
    names = [*first, *SLOTS]
    node = helper.make_node(
        "GroupQueryAttention",
        [name if name in given or name == "total" else "" for name in names],
        ["found", "present_key", "present_value"],
        name="the_node",
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=SHARED,
        **said,
    )
    graph = helper.make_graph(
        [node],
        "small",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in given.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in node.output],
        [numpy_helper.from_array(np.asarray(total, np.int32), "total")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _assert_agrees(call: Call, **said: Any) -> None:
    """Compare only specified values: no outputs of padding, and no positions from T on."""
    given = _given(call)
    made = _model(given, call.largest, do_rotary=int(call.rotary > 0), **said)
    expected, actual = theirs(made, given), ours(made, given)

    tolerance = 2e-5 if call.dtype is np.float32 else 4e-3
    assert [(e.shape, e.dtype) for e in expected] == [(a.shape, a.dtype) for a in actual]
    for row, length in enumerate(call.lengths):
        real = min(call.steps, length + 1)
        cuts = (np.s_[row, :real], np.s_[row, :, : length + 1], np.s_[row, :, : length + 1])
        for cut, want, got in zip(cuts, expected, actual, strict=True):
            np.testing.assert_allclose(got[cut], want[cut], rtol=tolerance, atol=tolerance)
    assert all(np.isfinite(item).all() for item in actual)


PROMPT = Call(steps=5, lengths=(4, 2))
"""The second entry is padded by two steps."""
STEP = Call(steps=1, lengths=(6, 3), past=6)
"""The caches of the entries are full to 6 and to 3."""
MORE = Call(steps=3, lengths=(7,), past=5)
BUFFER = Call(steps=1, lengths=(6, 3), past=12, total=7)
"""A cache larger than its content."""

CALLS: list[tuple[Call, dict[str, Any]]] = [
    (replace(PROMPT, rotary=16), {}),
    (replace(PROMPT, is_packed=True, rotary=8, has_sink=True), {"rotary_interleaved": 1}),
    (replace(PROMPT, has_bias=True), {"softcap": 0.7, "local_window_size": 2}),
    (replace(STEP, is_packed=True, rotary=16), {"local_window_size": 3, "scale": 0.3}),
    (replace(STEP, has_bias=True, has_positions=True, rotary=8), {"softcap": 0.7}),
    (replace(BUFFER, rotary=16, has_bias=True), {"smooth_softmax": 1}),
    (replace(MORE, rotary=16, has_sink=True), {"local_window_size": 2}),
    (replace(MORE, rotary=8, dtype=np.float16), {}),
]


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_it_is_that_of_onnxruntime(call: Call, said: dict[str, Any]) -> None:
    _assert_agrees(call, **said)


WINDOWS, SOFTCAPS, SINKS = (-1, 2), (0.0, 0.7), ("", "smooth", "given")


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.large)])
@pytest.mark.parametrize("base", [PROMPT, STEP, MORE, BUFFER])
def test_every_attribute_with_every_other_is_that_of_onnxruntime(base: Call, half: int) -> None:
    """Each half of the combinations covers all values of any three attributes together."""
    for window, softcap, has_bias, sink in product(WINDOWS, SOFTCAPS, (False, True), SINKS):
        index = WINDOWS.index(window) + SOFTCAPS.index(softcap) + has_bias + SINKS.index(sink)
        if index % 2 != half:
            continue
        call = replace(base, rotary=16, has_bias=has_bias, has_sink=sink == "given")
        _assert_agrees(
            call,
            local_window_size=window,
            softcap=softcap,
            smooth_softmax=int(sink == "smooth"),
        )


def test_without_causality_every_key_is_seen() -> None:
    """onnxruntime supports it for whole prompts, where every key except padding is seen."""
    call = replace(PROMPT, lengths=(4, 4))

    _assert_agrees(call, causal=0)


def test_lengths_that_the_cache_has_no_room_for_give_nan() -> None:
    """As for any index out of range, the result is neither an error nor a plausible answer."""
    given = _given(STEP)
    given["lengths"] = np.asarray([6, 7], np.int32)
    found, *_ = ours(_model(given, 7), given)

    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize(
    ("call", "total", "said", "reason"),
    [
        (STEP, 7, {"sliding_window_cache": 1, "local_window_size": 2}, "'sliding_window_cache'"),
        (STEP, 7, {"qk_output": 1}, "attribute 'qk_output' is not implemented"),
        (STEP, 7, {"k_quant_type": "PER_TENSOR"}, "a quantized cache is not implemented"),
        (PROMPT, 5, {"do_rotary": 1}, "expected cos_cache and sin_cache"),
        (PROMPT, 5, {"causal": 0, "local_window_size": 2}, "expected -1 with causal 0, got 2"),
        (PROMPT, 9, {}, "without past_key, expected a total_sequence_length of 5, got 9"),
    ],
)
def test_what_would_not_be_obeyed_is_refused(
    call: Call, total: int, said: dict[str, Any], reason: str
) -> None:
    given = _given(call)

    with pytest.raises(InvalidModel, match=f"GroupQueryAttention 'the_node'.*{reason}"):
        ours(_model(given, total, **said), given)


def test_a_total_that_depends_on_the_data_is_refused_with_what_to_do() -> None:
    given = _given(STEP) | {"total": np.asarray(7, np.int32)}
    made = _model(given, 7)
    del made.graph.initializer[:]

    with pytest.raises(
        InvalidModel,
        match=r"depends on data but sets the size of output present_key; if it is a model input,"
        r" make it a constant with --const",
    ):
        ours(made, given)


def test_a_step_with_its_cache_is_imported_with_an_open_batch(tmp_path: Path) -> None:
    """Its rows are proved independent, so that steps of several sequences share a batch."""
    given = _given(replace(STEP, rotary=16))
    made = _model(given, 7, do_rotary=1)
    tables = [numpy_helper.from_array(given.pop(name), name) for name in ("cos", "sin")]
    made.graph.initializer.extend(tables)
    kept = [item for item in made.graph.input if item.name in given]
    del made.graph.input[:]
    made.graph.input.extend(kept)
    for item in made.graph.input:
        item.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(made, tmp_path / "model.onnx")
    imported = import_model(tmp_path / "model.onnx", tmp_path / "m", Options(check=False))

    assert ("", 32) == (imported.notice, imported.manifest.max_batch_size)
