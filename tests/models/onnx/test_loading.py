"""Loading ONNX models from a repository, without a server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from support.onnx_models import model, node, save

from xlaserve.artifact import onnx_source
from xlaserve.errors import InvalidModel, LoadCancelled
from xlaserve.importers.onnx import importing, loading
from xlaserve.importers.onnx.importing import Options
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Stage
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.conversions import Conversions
from xlaserve.settings import Settings


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version directory with a model of one node."""
    directory = tmp_path / "1"
    directory.mkdir()
    save(
        model([node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, ("n", 2))}, ["y"]), directory
    )
    return directory


@pytest.mark.parametrize("compare", [True, False])
def test_what_is_checked_is_compared_and_what_is_served_is_not(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, compare: bool
) -> None:
    asked: list[Options] = []

    def import_model(path: Path, directory: Path, options: Options, *_: Any) -> None:
        asked.append(options)
        raise InvalidModel("enough")

    monkeypatch.setattr(importing, "import_model", import_model)
    settings = Settings(repository=tmp_path, compilation_cache_directory="none")
    made = compilation.of_settings(settings, compare=compare)
    context = LoadContext("m", "1", ModelConfig(), compilation=made)
    with pytest.raises(InvalidModel, match=r"^model\.onnx cannot be converted: enough$"):
        loading.load(version, context)

    assert [compare] == [options.check for options in asked]


def test_a_load_that_is_cancelled_ends_at_its_next_step(version: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def check_cancelled() -> None:
        if "converting" in seen:
            raise LoadCancelled("m")

    def on_stage(stage: Stage) -> None:
        seen.append(stage.name)

    context = LoadContext(
        "m",
        "1",
        ModelConfig(),
        on_stage=on_stage,
        check_cancelled=check_cancelled,
        compilation=Compilation(conversions=Conversions(scratch=tmp_path)),
    )
    with pytest.raises(LoadCancelled):
        loading.load(version, context)

    assert "exporting" not in seen
    assert ["1"] == [path.name for path in tmp_path.iterdir()]


def test_a_file_that_changes_meanwhile_is_not_kept(version: Path, tmp_path: Path) -> None:
    def on_stage(stage: Stage) -> None:
        if stage.name == "exporting":
            (version / "model.onnx").write_bytes(b"another")

    conversions = Conversions(scratch=tmp_path)
    context = LoadContext(
        "m", "1", ModelConfig(), on_stage=on_stage, compilation=Compilation(conversions=conversions)
    )
    with pytest.raises(InvalidModel, match="changed during the conversion"):
        loading.load(version, context)


def test_whatever_conversion_raises_names_the_file(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_model(*_: Any) -> None:
        raise RecursionError("too deep\nfar too deep")

    monkeypatch.setattr(importing, "import_model", import_model)
    with pytest.raises(
        InvalidModel, match="^model.onnx cannot be converted: RecursionError: too deep$"
    ):
        loading.load(version, LoadContext("m", "1", ModelConfig()))


def test_a_file_may_be_the_whole_model(version: Path, tmp_path: Path) -> None:
    context = LoadContext(
        "m", "1", ModelConfig(), compilation=Compilation(conversions=Conversions(scratch=tmp_path))
    )
    loaded = loaders.load(version / "model.onnx", context)
    found = loaded.execute({"x": np.array([[-1, 2]], np.float32)})["y"]
    loaded.close()

    assert [[0, 2]] == np.asarray(found).tolist()
    assert ["1"] == [path.name for path in tmp_path.iterdir()]


def _key(version: Path, config: ModelConfig | None = None) -> str:
    source = onnx_source.find(version, config or ModelConfig())
    assert source is not None
    return onnx_source.key(source, limit_bytes=1 << 20)


def test_the_key_has_all_that_a_conversion_depends_on(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [_key(version), _key(version, ModelConfig(is_unbatched=True))]
    (version / "weights.bin").write_bytes(b"1")
    keys.append(_key(version))
    (version / "weights.bin").write_bytes(b"2")
    keys.append(_key(version))
    (version / "weights.bin").rename(version / "others.bin")
    keys.append(_key(version))
    (version / "another.onnx").write_bytes(b"")
    same = _key(version)
    monkeypatch.setattr(onnx_source, "_version", lambda package: "0")
    keys.append(_key(version))

    assert len(keys) == len(set(keys))
    assert keys[-2] == same


def test_the_key_of_a_file_has_what_lies_beside_it(version: Path) -> None:
    """By name, size and time only, because files may be large; subdirectories are ignored."""
    file = version / "model.onnx"
    (version / "below").mkdir()
    first = _key(file)
    (version / "below/x").write_bytes(b"1")
    second = _key(file)
    (version / "x.data").write_bytes(b"1")
    third = _key(file)

    assert first == second != third
