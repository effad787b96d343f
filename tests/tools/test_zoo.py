import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import zoo
import zoo_page
from zoo_rows import LEARNED, PACKAGED, ROWS, Result, Row

FOREST, SCALED, TEXTS = LEARNED[:3]
FEW = (FOREST, SCALED, TEXTS, LEARNED[-1])


def result(**figures: Any) -> Result:
    return Result("magika", "magika==1", "MIT", 1000, **figures)


def test_every_model_has_a_row_of_the_page_with_its_command() -> None:
    """The tool writes the page from these rows, when they have changed."""
    page = zoo.PAGE.read_text()

    assert len(ROWS) == len({row.name for row in ROWS})
    for row in ROWS:
        said = [line for line in page.splitlines() if line.startswith(f"| {row.name} |")]
        assert said, row.name
        assert any(f"`{row.options}`" in line for line in said) or not row.options


def test_rows_are_pinned_and_compared() -> None:
    assert [] == [row.name for row in PACKAGED if "==" not in row.package]
    assert [] == [row.name for row in ROWS if "--no-check" in row.options]


def test_difference_is_in_parts_of_the_largest_number() -> None:
    ones, moved = np.asarray([1.0, -2.0]), np.asarray([1.0, -1.5])

    assert 0.25 == zoo.difference(moved, ones)
    assert 0.05 == zoo.difference(moved, ones, least=10.0)
    assert np.inf == zoo.difference(ones[:1], ones)
    assert np.inf == zoo.difference(np.asarray([1.0, np.nan]), ones)
    assert 0.0 == zoo.difference(np.asarray([np.nan]), np.asarray([np.nan]))


def test_what_is_no_good_result_is_told() -> None:
    """A refusal that is not expected, one of another kind, and an inexact answer."""
    known = replace(PACKAGED[0], refused="not one of the")

    assert "" == result().fails(PACKAGED[0])
    assert "is off" == result(wrong="is off").fails(known)
    assert "no operator" == result(refused="no operator").fails(PACKAGED[0])
    assert "" == result(refused="X is not one of the supported operators").fails(known)
    assert "expected" in result(refused="it is too large").fails(known)
    assert "imports now" in result().fails(known)


def test_page_tells_what_is_served_from_what_is_refused() -> None:
    rows = [
        (FOREST, result(difference=1e-6, batches=(1, 3))),
        (replace(PACKAGED[0], name="fixed"), result(batches=(0,))),
        (replace(TEXTS, name="other"), result(refused="no | operator")),
    ]

    page = zoo_page.page(rows)

    assert "2 of 3 models are served and agree" in page
    assert "| digits-forest | classifies digits | magika==1 | MIT | 1 kB |" in page
    assert "| 0 | fixed |" in page
    assert "no \\| operator |" in page.partition("## Refused")[2]


@pytest.mark.slow
def test_models_are_imported_served_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with inexact answers fails, and so does a failed import; the network is not used."""
    pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")
    monkeypatch.setattr(zoo, "TIMED_SECONDS", 0.01)
    page = tmp_path / "page.md"
    arguments = ["--cache", str(tmp_path), "--page", str(page)]

    assert 0 == zoo.main(arguments, FEW)
    assert "4 of 4 models are served and agree" in page.read_text()
    assert 0 == zoo.main([*arguments, "--missing"], FEW)

    monkeypatch.setattr(zoo, "Reference", Off)
    wrong = Row("refused", "nothing", "", FOREST.path, "--dim no=1")
    assert 1 == zoo.main(arguments, [FOREST, wrong])
    told = capsys.readouterr().out
    assert re.search(r"digits-forest: FAILED: output '\w+' is off by ", told)
    assert "refused: FAILED: the model has no dimension 'no'" in told


class Off(zoo.Reference):
    """A reference whose last output is off by a thousandth."""

    def __call__(self, *asked: Any) -> list[Any]:
        *others, last = super().__call__(*asked)
        return [*others, last * 1.001]
