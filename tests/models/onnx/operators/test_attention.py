"""Attention cases that onnx's own suite lacks: any batch, and refusals."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import Inputs, exported, largest_difference, model, node, ours, single

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

RANDOM = np.random.default_rng(8)
FLOAT = 1


def _normal(*shape: int) -> Tensor:
    return RANDOM.standard_normal(shape, np.float32)


def _softmax(scores: Tensor) -> Tensor:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def test_attention_with_a_cache_takes_any_batch_and_length() -> None:
    """The queries come after the cached keys, and the mask is causal."""
    nodes = [
        node(
            "Attention",
            ["q", "k", "v", "", "past_k", "past_v"],
            ["y", "now_k", "now_v"],
            q_num_heads=4,
            kv_num_heads=2,
            is_causal=1,
            softcap=2.0,
        )
    ]
    hidden = {"q": 12, "k": 6, "v": 6}
    inputs: Inputs = {name: (FLOAT, ["N", "S", size]) for name, size in hidden.items()}
    caches: Inputs = {name: (FLOAT, ["N", 2, "P", 3]) for name in ("past_k", "past_v")}
    made = model(nodes, {**inputs, **caches}, ["y", "now_k", "now_v"], opset=24)
    shapes = {name: f"b,s,{size}" for name, size in hidden.items()}
    run = exported(made, "b,s,p", {**shapes, "past_k": "b,2,p,3", "past_v": "b,2,p,3"})
    given = {name: _normal(2, 3, size) for name, size in hidden.items()}
    given |= {name: _normal(2, 2, 5, 3) for name in caches}
    q, k, v = (given[name].reshape(2, 3, -1, 3).swapaxes(1, 2) for name in hidden)
    keys = np.concatenate([given["past_k"], k], 2)
    values = np.concatenate([given["past_v"], v], 2)
    scores = 2 * np.tanh(q @ keys.repeat(2, 1).swapaxes(2, 3) / np.sqrt(3) / 2)
    scores = np.where(np.arange(8)[None, :] <= np.arange(3)[:, None] + 5, scores, -np.inf)
    expected = (_softmax(scores) @ values.repeat(2, 1)).swapaxes(1, 2).reshape(2, 3, 12)

    found = run(given)

    assert largest_difference([expected.astype(np.float32), keys, values], found) < 1e-5


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    given = {"q": _normal(1, 1, 2, 4), "k": _normal(1, 1, 3, 4), "v": _normal(1, 1, 3, 4)}
    mask = np.asarray([[True, False, True], [False, False, False]])
    made = single("Attention", given, {"mask": mask}, opset=23)

    (found,) = ours(made, given)

    assert [True, False] == [bool(row.any()) for row in found[0, 0]]
    assert not np.isnan(found).any()


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"q_num_heads": 5, "kv_num_heads": 2},
            "hidden size of 12 is not a multiple of its 5 heads",
        ),
        (
            {"q_num_heads": 3, "kv_num_heads": 2},
            "3 query heads are not a multiple of its 2 key heads",
        ),
        ({"q_num_heads": 2, "kv_num_heads": 2, "qk_matmul_output_mode": 9}, "0 to 3, got 9"),
        ({"q_num_heads": 2}, "attribute 'kv_num_heads' is missing"),
    ],
)
def test_attention_that_cannot_be_is_refused(attributes: dict[str, Any], said: str) -> None:
    size = 12 // attributes["q_num_heads"] * 2
    given = {"q": _normal(1, 2, 12), "k": _normal(1, 2, size), "v": _normal(1, 2, size)}

    with pytest.raises(InvalidModel, match=f"Attention 'the_y'.*{said}"):
        ours(single("Attention", given, opset=24, **attributes), given)


def test_linear_attention_takes_any_batch_and_length() -> None:
    """The state after two halves of a sequence equals that after the whole sequence."""
    nodes = [
        node(
            "LinearAttention",
            ["q", "q", "q", "past"],
            ["y", "now"],
            q_num_heads=2,
            kv_num_heads=2,
            update_rule="linear",
        )
    ]
    inputs: Inputs = {"q": (FLOAT, ["N", "S", 4]), "past": (FLOAT, ["N", 2, 2, 2])}
    run = exported(
        model(nodes, inputs, ["y", "now"], opset=27), "b,s", {"q": "b,s,4", "past": "b,2,2,2"}
    )
    q, none = _normal(3, 6, 4), np.zeros((3, 2, 2, 2), np.float32)
    whole, end = run({"q": q, "past": none})
    first, middle = run({"q": q[:, :2], "past": none})
    second, last = run({"q": q[:, 2:], "past": middle})

    halves = [np.concatenate([first, second], 1), last]
    assert largest_difference([whole, end], halves) < 1e-5
    keys = q.reshape(3, 6, 2, 2)
    assert largest_difference([np.einsum("bthk,bthv->bhkv", keys, keys)], [end]) < 1e-5
