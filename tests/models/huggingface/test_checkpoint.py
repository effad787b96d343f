"""Checkpoints are read completely: unknown, missing or misshapen tensors are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import jax
import ml_dtypes
import numpy as np
import pytest

import huggingface_references as references
from xlaserve.artifact import weights
from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface import checkpoint, configuration
from xlaserve.tensors import Tensor

DATA = Path(__file__).parents[2] / "data/huggingface"
Tensors: TypeAlias = dict[str, Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"
HEAD = "lm_head.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"


def tensors_of(name: str) -> Tensors:
    shapes = json.loads((DATA / name / "shapes.json").read_text())
    return {key: references.seeded(key, tuple(shape)) for key, shape in shapes.items()}


def index(directory: Path, named: dict[str, str]) -> None:
    (directory / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))


def shards(directory: Path, tensors: Tensors) -> dict[str, str]:
    """Distribute the tensors alternately over two files; return the file of each."""
    parts: tuple[Tensors, Tensors] = ({}, {})
    for number, (name, array) in enumerate(tensors.items()):
        parts[number % 2][name] = array
    for number, part in enumerate(parts):
        weights.write(directory / f"{number}.safetensors", part)
    return {name: f"{n}.safetensors" for n, part in enumerate(parts) for name in part}


def test_shards_give_the_same_parameters(tmp_path: Path) -> None:
    form, tensors = configuration.read(DATA / "phi3"), tensors_of("phi3")
    index(tmp_path, shards(tmp_path, tensors))
    params = checkpoint.read(tmp_path, form)
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]

    np.testing.assert_array_equal(params["head"], tensors[HEAD])
    np.testing.assert_array_equal(params["layers"][1]["v"], fused[-32:])
    assert not params["layers"][1]["v"].flags.owndata


def _lacking(tensors: Tensors) -> None:
    del tensors[Q]


def _misshapen(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q][:8]


def _of_integers(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].astype(np.int8)


def _mixed(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].astype(ml_dtypes.bfloat16)


def _extra(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.weight"] = np.zeros((3,), np.float32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_lacking, rf"'{Q}': expected shape \[64, 64\], the checkpoint has none"),
        (_misshapen, rf"'{Q}': expected shape \[64, 64\], got \[8, 64\]"),
        (_of_integers, rf"'{Q}': expected one of bfloat16, float16, float32, got int8"),
        (_mixed, r"'q' of layer 1: expected float32 like the embedding, got bfloat16"),
        (_extra, r"'model.layers.2.mlp.weight' .*3.* and 0 more are in the checkpoint"),
    ],
)
def test_refused_by_name(tmp_path: Path, change: Callable[[Tensors], None], text: str) -> None:
    tensors = tensors_of("mistral")
    change(tensors)
    weights.write(tmp_path / checkpoint.SINGLE, tensors)
    with pytest.raises(InvalidModel, match=text):
        checkpoint.read(tmp_path, configuration.read(DATA / "mistral"))


def test_what_is_derived_or_tied_may_be_stored_too(tmp_path: Path) -> None:
    tensors = tensors_of("qwen2")
    tensors[HEAD] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros((8,), np.float32)
    weights.write(tmp_path / checkpoint.SINGLE, tensors)

    assert "head" not in checkpoint.read(tmp_path, configuration.read(DATA / "qwen2"))


def test_a_head_that_differs_from_what_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("qwen2")
    tensors[HEAD] = tensors["model.embed_tokens.weight"] + np.float32(1)
    weights.write(tmp_path / checkpoint.SINGLE, tensors)
    with pytest.raises(InvalidModel, match=f"'{HEAD}' differs from"):
        checkpoint.read(tmp_path, configuration.read(DATA / "qwen2"))


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("../0.safetensors", "expected file names in the same directory, got '"),
        ("1.safetensors", "is in 0.safetensors, but .* has it in 1.safetensors"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, place: str, text: str) -> None:
    named = shards(tmp_path, tensors_of("mistral"))
    named["model.embed_tokens.weight"] = place
    index(tmp_path, named)
    with pytest.raises(InvalidModel, match=text):
        checkpoint.read(tmp_path, configuration.read(DATA / "mistral"))


def test_an_index_that_names_what_no_shard_has_is_refused(tmp_path: Path) -> None:
    index(tmp_path, {**shards(tmp_path, tensors_of("mistral")), "x": "0.safetensors"})
    with pytest.raises(InvalidModel, match="'x' is missing from 0.safetensors, where .* has it"):
        checkpoint.read(tmp_path, configuration.read(DATA / "mistral"))


@pytest.mark.parametrize("text", [None, "[]", "{}"])
def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / checkpoint.INDEX).write_text(text)
    with pytest.raises(InvalidModel, match="has neither|expected a weight_map"):
        checkpoint.read(tmp_path, configuration.read(DATA / "mistral"))


@pytest.mark.parametrize(
    ("name", "place", "roles"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3-moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_may_be_stored_together(
    tmp_path: Path, name: str, place: str, roles: tuple[str, ...]
) -> None:
    """As transformers 5 holds them in memory; by default it stores them one by one."""
    form, apart = configuration.read(DATA / name), tensors_of(name)
    together = {key: array for key, array in apart.items() if ".experts." not in key}
    assert form.experts is not None
    for layer, has_experts in enumerate(form.experts.layers):
        if not has_experts:
            continue
        prefix = f"model.layers.{layer}"
        router = together.pop(f"{prefix}.{place}.gate.weight")
        together[f"{prefix}.mlp.gate.weight"] = router
        gates, ups, downs = (
            np.stack(
                [
                    apart[f"{prefix}.{place}.experts.{number}.{one}.weight"]
                    for number in range(form.experts.count)
                ]
            )
            for one in roles
        )
        together[f"{prefix}.mlp.experts.gate_up_proj"] = np.concatenate([gates, ups], 1)
        together[f"{prefix}.mlp.experts.down_proj"] = downs
    found = []
    for tensors in (apart, together):
        weights.write(tmp_path / checkpoint.SINGLE, tensors)
        found.append(checkpoint.read(tmp_path, form, tmp_path))

    assert [checkpoint.SINGLE] == [file.name for file in tmp_path.iterdir()]
    jax.tree.map(np.testing.assert_array_equal, *found)


def _expert_lacking(tensors: Tensors) -> None:
    del tensors[EXPERT.format(2)]


def _expert_misshapen(tensors: Tensors) -> None:
    tensors[EXPERT.format(0)] = tensors[EXPERT.format(0)].T


def _expert_of_its_own(tensors: Tensors) -> None:
    tensors[EXPERT.format(3)] = tensors[EXPERT.format(3)].astype(np.float16)


def _one_expert_more(tensors: Tensors) -> None:
    tensors[EXPERT.format(4)] = tensors[EXPERT.format(3)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_expert_lacking, r"experts.2.w3.weight': expected shape \[96, 64\], .* has none"),
        (_expert_misshapen, r"experts.0.w3.weight': expected shape \[96, 64\], got \[64, 96\]"),
        (_expert_of_its_own, r"experts.3.w3.weight': expected float32 .*, got float16"),
        (_one_expert_more, r"experts.4.w3.weight' .* and 0 more are in the checkpoint"),
    ],
)
def test_experts_are_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], None], text: str
) -> None:
    tensors = tensors_of("mixtral")
    change(tensors)
    weights.write(tmp_path / checkpoint.SINGLE, tensors)
    with pytest.raises(InvalidModel, match=text):
        checkpoint.read(tmp_path, configuration.read(DATA / "mixtral"))


def test_gpt2_may_lack_its_prefix_and_store_masks(tmp_path: Path) -> None:
    """As in its first checkpoints: no `transformer.` prefix, and a mask in each layer."""
    tensors = tensors_of("gpt2")
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    bare["h.1.attn.bias"] = np.ones((1, 1, 128, 128), np.uint8)
    weights.write(tmp_path / checkpoint.SINGLE, bare)
    params = checkpoint.read(tmp_path, configuration.read(DATA / "gpt2"))
    fused = tensors["transformer.h.1.attn.c_attn.weight"]

    np.testing.assert_array_equal(params["layers"][1]["v"], fused[:, -64:].T)
    np.testing.assert_array_equal(params["positions"], tensors["transformer.wpe.weight"])


def test_a_tensor_of_no_layer_with_another_dtype_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("gpt2")
    tensors["transformer.ln_f.bias"] = tensors["transformer.ln_f.bias"].astype(np.float16)
    weights.write(tmp_path / checkpoint.SINGLE, tensors)
    with pytest.raises(InvalidModel, match="'norm_bias': expected float32 .*, got float16"):
        checkpoint.read(tmp_path, configuration.read(DATA / "gpt2"))


def test_a_transposed_tensor_is_refused_with_the_shape_it_is_stored_in(tmp_path: Path) -> None:
    tensors = tensors_of("gpt2")
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    weights.write(tmp_path / checkpoint.SINGLE, tensors)
    with pytest.raises(InvalidModel, match=rf"'{name}': expected shape \[64, 256\], got"):
        checkpoint.read(tmp_path, configuration.read(DATA / "gpt2"))
