"""The key of loads that need the same memory."""

import shutil
from pathlib import Path

from xlaserve.artifact.load_key import load_key
from xlaserve.files.roots import ANYWHERE
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json


def config(text: str) -> ModelConfig:
    return parse_json(text, limit_bytes=1000)


def test_the_same_computation_has_one_key_whatever_it_is_called(
    example_models: Path, tmp_path: Path
) -> None:
    shutil.copytree(example_models / "mlp/1", tmp_path / "7")
    keys = {
        load_key(path, named, ANYWHERE)
        for path in (example_models / "mlp/1", tmp_path / "7")
        for named in (ModelConfig(), ModelConfig(name="a"), ModelConfig(name="b"))
    }

    assert 1 == len(keys)
    assert None not in keys


def test_what_changes_the_memory_changes_the_key(example_models: Path) -> None:
    """Another computation, other batch sizes, and more copies change it."""
    said = (
        "{}",
        '{"max_batch_size": 4}',
        '{"parameters": {"batch_sizes": {"string_value": "1,8"}}}',
        '{"parameters": {"batch_sizes": {"string_value": "1,4"}}}',
        '{"dynamic_batching": {"preferred_batch_size": [5]}}',
        '{"instance_group": [{"kind": "KIND_CPU", "count": 2}]}',
    )
    keys = {load_key(example_models / "mlp/1", config(text), ANYWHERE) for text in said}
    keys.add(load_key(example_models / "digits/1", ModelConfig(), ANYWHERE))

    assert len(said) + 1 == len(keys)


def test_what_has_no_manifest_has_no_key(tmp_path: Path) -> None:
    file = tmp_path / "model.jaxexp"
    file.write_bytes(b"")

    assert [None, None] == [load_key(at, ModelConfig(), ANYWHERE) for at in (tmp_path, file)]
