"""Labels of a model: their total size is limited, and each file is read once."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json
from xlaserve.residence.repository import directory_reader
from xlaserve.residence.repository.directory_reader import DirectoryReader


def configured(names: Sequence[str]) -> ModelConfig:
    outputs = [
        {"name": f"y{number}", "data_type": "TYPE_FP32", "dims": [2], "label_filename": name}
        for number, name in enumerate(names)
    ]
    return parse_json(json.dumps({"output": outputs}))


def labelled(folder: Path, names: Sequence[str]) -> ModelConfig:
    reader = DirectoryReader(folder, Roots.of((folder,)), 1 << 20)
    return reader.labelled(folder, configured(names))


def test_a_file_of_many_outputs_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file also counts once towards the limit, however many outputs name it."""
    monkeypatch.setattr(directory_reader, "MAX_LABELS", 3)
    (tmp_path / "labels.txt").write_text("one\ntwo")

    found = labelled(tmp_path, ["labels.txt"] * 100).labels

    assert {f"y{number}" for number in range(100)} == set(found)
    assert 1 == len({id(lines) for lines in found.values()})
    assert (b"one", b"two") == found["y99"]


@pytest.mark.parametrize(
    ("limit", "most", "error"),
    [
        ("MAX_LABELS", 5, "'y1': expected at most 3 lines in the label file .5 per model."),
        ("MAX_LABEL_BYTES", 12, "label_filename of output 'y1': "),
    ],
)
def test_files_of_several_outputs_are_limited_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, error: str
) -> None:
    for name, text in (("a", "one\ntwo"), ("b", "1\n2\n3\n4")):
        (tmp_path / name).write_text(text)
    alone = [labelled(tmp_path, [name]).labels["y0"] for name in "ab"]
    monkeypatch.setattr(directory_reader, limit, most)

    assert [2, 4] == [len(lines) for lines in alone]
    with pytest.raises(InvalidModel, match=error):
        labelled(tmp_path, ["a", "b"])
