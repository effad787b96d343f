# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.clock import HandClock
from support.onnx_models import FLOAT, model, node, save

import onnx_speed
import onnx_speed_page
from onnx_speed_page import Row
from xlaserve.process import allocator


def test_row_for_each_batch_and_the_mean_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with an open image size, run once or more by both runtimes."""
    weights = {"w": np.ones((4, 1, 3, 3), np.float32)}
    convolution = node("Conv", ["x", "w"], ["y"], group=4)
    made = model([convolution], {"x": (FLOAT, ["N", 4, "H", "W"])}, ["y"], weights)
    path = save(made, tmp_path, "tiny.onnx")

    # This process's allocator cannot be reset afterwards.
    monkeypatch.setattr(allocator, "give_back_large_blocks", lambda **_: True)
    onnx_speed.main([f"{path}:x=4,8,8", "--batch", "1,2", "--seconds", "0.01"])

    *rows, _, mean = capsys.readouterr().out.splitlines()
    assert ["| tiny | 1", "| tiny | 2"] == [row[:10] for row in rows[2:]]
    assert all(float(row.split("|")[5]) > 0 for row in rows[2:])
    assert mean.startswith("geometric mean ")


def test_jax_is_set_as_the_server_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With asynchronous dispatch, a small model would run on another thread."""
    path = save(model([node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["N", 4])}, ["y"]), tmp_path)
    monkeypatch.setattr(allocator, "give_back_large_blocks", lambda **_: True)
    jax.config.update("jax_cpu_enable_async_dispatch", True)

    onnx_speed.main([str(path), "--batch", "1", "--seconds", "0.01"])

    assert not jax.config.read("jax_cpu_enable_async_dispatch")


def test_answers_that_differ_end_the_comparison() -> None:
    right = [np.ones(3, np.float32)]

    onnx_speed.check_alike([right[0] * 1.0001], right)
    for wrong in (1.01, np.nan):
        with pytest.raises(SystemExit, match="answers differ by"):
            onnx_speed.check_alike([right[0] * wrong], right)


def test_mean_is_geometric() -> None:
    assert 1.0 == pytest.approx(onnx_speed_page.geometric_mean([4.0, 0.25]))


def test_table_is_written_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = onnx_speed_page.BEGIN, onnx_speed_page.END
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")

    onnx_speed_page.write([Row("a", 1, 0.002, 0.001, 1), Row("b", 8, 0.001, 0.002, 2)], page)

    table = (
        f"{onnx_speed_page.HEAD}\n| a | 1 | 2.00 | 1.00 | 2.00 | 1 |\n"
        "| b | 8 | 1.00 | 2.00 | 0.50 | 2 |\n\nGeometric mean 1.00, most 2.00 (a, batch of 1)."
    )
    assert f"before\n{begin}\n\n{table}\n\n{end}\nafter\n" == page.read_text()

    page.write_text(begin)
    with pytest.raises(ValueError, match="each once"):
        onnx_speed_page.write([Row("a", 1, 1.0, 1.0, 1)], page)


def test_page_has_the_markers() -> None:
    text = onnx_speed.PAGE.read_text()

    assert (1, 1) == (text.count(onnx_speed_page.BEGIN), text.count(onnx_speed_page.END))


def test_both_are_timed_by_turns_and_the_first_of_a_turn_does_not_count() -> None:
    """On a clock that only executions advance: the first run of each turn takes a second longer."""
    clock = HandClock()
    turns: list[str] = []

    def engine(name: str, seconds: float) -> onnx_speed.Execute:
        def run() -> list[float]:
            clock.now += seconds + (not turns or turns[-1] != name)
            turns.append(name)
            return []

        return run

    found = onnx_speed.medians(engine("ours", 0.02), engine("theirs", 0.04), 0.0, clock)

    assert (0.02, 0.04) == pytest.approx(found)
    firsts = [name for name, before in zip(turns, [None, *turns], strict=False) if name != before]
    assert ["theirs", "ours", "theirs"] == firsts[:3]


def test_rows_share_the_time_that_is_left() -> None:
    clock = HandClock()
    budget = onnx_speed.Budget(100.0, models=2, clock=clock)
    clock.now += 20
    budget.prepared(20)

    # Twenty seconds are kept for the next model.
    assert 15.0 == pytest.approx(budget.for_row(4, most=30))
    assert 5.0 == pytest.approx(budget.for_row(4, most=5))
    clock.now += 100
    assert (0.0, onnx_speed.LEAST_SECONDS) == (budget.left, budget.for_row(1, most=5))
