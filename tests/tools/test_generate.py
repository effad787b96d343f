"""`tools/generate.py --check` finds every difference in committed generated code."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", TOOLS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ({"a": "1", "b": "2"}, []),
        ({"a": "1"}, ["missing: b"]),
        ({"a": "1", "b": "2", "c": "3"}, ["left over: c"]),
        ({"a": "1", "b": "changed"}, ["changed: b"]),
        ({"a": "1", "b": "2", "py.typed": ""}, []),
    ],
)
def test_changed_missing_and_left_over_files_are_found(
    generate: ModuleType, tmp_path: Path, committed: dict[str, str], expected: list[str]
) -> None:
    """A handwritten marker file counts as none of these."""
    fresh = written(tmp_path / "fresh", a="1", b="2")

    assert expected == generate.differences(fresh, written(tmp_path / "committed", **committed))
