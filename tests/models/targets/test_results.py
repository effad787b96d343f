import os
from pathlib import Path

import pytest

from xlaserve.offline.targets import results
from xlaserve.offline.targets.results import Results, key_of
from xlaserve.runtime.programs.footprint import Footprint

FOOTPRINT = Footprint(1, 2, 3, 4, 5, 6, 7, 8)


def test_a_result_is_there_for_the_next_process(tmp_path: Path) -> None:
    Results(tmp_path / "cache").put("a", FOOTPRINT)

    assert FOOTPRINT == Results(tmp_path / "cache").get("a")
    assert None is Results(tmp_path / "cache").get("b")


def test_without_a_directory_nothing_is_kept() -> None:
    Results(None).put("a", FOOTPRINT)

    assert None is Results(None).get("a")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"code_bytes": "many"}', b"\xff"])
def test_what_cannot_be_read_is_not_there(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)

    assert None is Results(tmp_path).get("a")


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    Results(tmp_path / "file").put("a", FOOTPRINT)


def test_a_key_depends_on_all_that_changes_a_program() -> None:
    said = (b"module", "h100", {"jax": "1"}, ["--a"])
    others = [
        (b"other", *said[1:]),
        (said[0], "a100", *said[2:]),
        (*said[:2], {"jax": "2"}, said[3]),
        (*said[:3], ["--b"]),
    ]

    assert key_of(*said) == key_of(*said)
    assert 5 == len({key_of(*said), *(key_of(*other) for other in others)})


def test_the_oldest_results_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_ENTRIES", 4)
    monkeypatch.setattr(results, "_PRUNED_EVERY", 1)
    for age, name in enumerate("abcdef"):
        Results(tmp_path).put(name, FOOTPRINT)
        os.utime(tmp_path / f"{name}.json", (age, age))

    assert ["c", "d", "e", "f"] == sorted(path.stem for path in tmp_path.glob("*.json"))
