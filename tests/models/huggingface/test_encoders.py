"""Encoders match the embeddings of sentence-transformers, and refuse unsupported settings."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.encoders import DATA, write_tensors

import encoder_references as references
from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface.encoders import configuration, forward, parameters
from xlaserve.language import tokenizing

TOLERANCE = 1e-5
SLOW = {"bert-masked", "roberta", "xlm-roberta", "distilbert"}


def checkpoint_of(name: str, directory: Path) -> Path:
    """Write a checkpoint directory in the layout of sentence-transformers."""
    shutil.copytree(DATA / name, directory)
    write_tensors(directory, name)
    return directory


def batch(directory: Path, pad: int) -> tuple[Any, Any]:
    """Return the padded tokens of the reference texts, and their mask."""
    tokens = tokenizing.parse((directory / "tokenizer.json").read_bytes(), "m")
    rows = [tokens.encode(text) for text in references.TEXTS]
    ids = np.full((len(rows), max(map(len, rows)) + 3), pad, np.int32)
    mask = np.zeros_like(ids)
    for row, found in enumerate(rows):
        ids[row, : len(found)], mask[row, : len(found)] = found, 1
    return ids, mask


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in references.CASES],
)
def test_embeddings_are_those_of_sentence_transformers_whatever_the_padding(
    tmp_path: Path, name: str
) -> None:
    directory = checkpoint_of(name, tmp_path / "source")
    with np.load(DATA / name / "references.npz") as found:
        wanted = found["embeddings"]

    form, family = configuration.read(directory)
    params, left = parameters.read(directory, form, family)
    program = jax.jit(partial(forward.embed, form))
    ids, mask = batch(directory, form.pad)
    got = np.asarray(program(params, ids, mask))
    # Masked tokens may have any value.
    other = np.asarray(program(params, np.where(mask, ids, 5).astype(np.int32), mask))

    assert wanted.shape == got.shape == (len(references.TEXTS), form.size)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE * np.abs(wanted).max(), rtol=0)
    np.testing.assert_array_equal(got, other)
    assert all(one.startswith(family.heads) for one in left)
    assert 24 == form.max_tokens


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "config.json",
        {"rope_theta": 1.0},
        "'rope_theta' is not supported and may change the computation",
    ),
    ("config.json", {"is_decoder": True}, "is_decoder: expected False, got True"),
    ("config.json", {"position_embedding_type": "relative_key"}, "expected absolute"),
    ("config.json", {"hidden_act": "mish"}, "hidden_act: expected one of gelu"),
    ("config.json", {"num_attention_heads": 5}, "expected a divisor of 32, got 5"),
    ("config.json", {"max_position_embeddings": 20}, "expected at most 20, the positions"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case: expected False"),
    (
        "sentence_bert_config.json",
        {"stem": 1},
        "'stem' is not supported and may change the computation",
    ),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length: expected 1 or more"),
    (
        "1_Pooling/config.json",
        {"pooling_mode": "attention"},
        "pooling_mode: expected one or more of cls",
    ),
    ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt: expected True"),
    ("config_sentence_transformers.json", {"truncate_dim": 4}, "truncate_dim: expected None"),
    (
        "config_sentence_transformers.json",
        {"default_prompt_name": "ask"},
        "default_prompt_name: expected one of prompts, got 'ask'",
    ),
]


def test_what_is_not_obeyed_is_refused_by_its_key(tmp_path: Path) -> None:
    for number, (file, change, said) in enumerate(REFUSED):
        directory = tmp_path / str(number)
        shutil.copytree(DATA / "bert", directory)
        text = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**text, **change}))

        with pytest.raises(InvalidModel) as refused:
            configuration.read(directory)
        assert said in str(refused.value)


def test_a_layer_of_another_kind_is_refused_and_a_prompt_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "source"
    shutil.copytree(DATA / "bert", directory)
    file = directory / "config_sentence_transformers.json"
    asks = {"prompts": {"ask": "ask: "}, "default_prompt_name": "ask"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **asks}))

    assert "ask: " == configuration.read(directory)[0].prompt
    modules = json.loads((directory / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "a.models.Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        InvalidModel, match="expected Transformer, Pooling and optionally Normalize, got .*Dense"
    ):
        configuration.read(directory)


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    shapes = json.loads((DATA / "bert" / "shapes.json").read_text())
    for name, change, said in (
        ("more", {"encoder.gate.weight": [2]}, r"'encoder.gate.weight' float32\[2\] and 0 more"),
        ("other", {"embeddings.LayerNorm.bias": [3]}, r"expected shape \[32\], the checkpoint has"),
    ):
        directory = tmp_path / name
        shutil.copytree(DATA / "bert", directory)
        (directory / "shapes.json").write_text(json.dumps({**shapes, **change}))
        write_tensors(directory, "bert", {**shapes, **change})
        form, family = configuration.read(directory)

        with pytest.raises(InvalidModel, match=said):
            parameters.read(directory, form, family)
