"""Model code that might never end is executed in a process with a time limit."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.plain_models import load_plain

from xlaserve.artifact import manifest
from xlaserve.authoring.export import Exportable, export_model
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.verdict import Independence
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import trials
from xlaserve.runtime.programs.compilation import Compilation, of_settings
from xlaserve.runtime.programs.compilation_cache import CompilationCache
from xlaserve.runtime.programs.compilers.pool import CompilerProcesses, Limits
from xlaserve.settings import Settings

SECONDS = 2.0
"""CPU seconds before an endless run is stopped; others need less than one."""

LIMITS = Limits(1, 4 << 30, 60.0, 300.0, SECONDS)


@pytest.fixture(scope="module")
def processes() -> Iterator[CompilerProcesses]:
    made = CompilerProcesses(LIMITS)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _shared(processes: CompilerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports share one process, because starting it takes seconds."""
    monkeypatch.setattr(trials, "_own_processes", lambda seconds: processes)


def counted(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """Halve until no element is above 1, which never ends for infinity; rows are not proved."""
    loop = lambda s: (s[0] + 1, jnp.where(s[1] > 1, s[1] * 0.5, s[1]))  # noqa: E731
    trips, y = jax.lax.while_loop(lambda s: (s[1] > 1).any(), loop, (0, x))
    return {"y": y + 0 * jnp.asarray(trips, x.dtype)}


def endless(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """Run very long for zeros, as a warm-up would use them; the trip counts are constant."""

    def long(c: jax.Array) -> jax.Array:
        def twice(_: int, c: jax.Array) -> jax.Array:
            return jnp.asarray(jax.lax.fori_loop(0, 1 << 30, lambda i, d: d * 0.5 + x, c))

        return jnp.asarray(jax.lax.fori_loop(0, 1 << 30, twice, c))

    return {"y": jax.lax.cond(abs(x).max() == 0, long, lambda c: c, x)}


def never(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """Run until a sine exceeds 9."""
    return {"y": jax.lax.while_loop(lambda c: (c < 9).any(), jnp.sin, x)}


def steps(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """Take three steps, as a recurrent network does."""
    return {"y": jax.lax.fori_loop(0, 3, lambda _, c: c * 0.5 + params["w"], x)}


INPUTS = {"x": ("FP32", [-1, 4])}
PARAMS = {"w": np.ones((1, 4), np.float32)}


def loaded(directory: Path, compilation: Compilation, **more: Any) -> JaxExportModel:
    context = LoadContext("m", "1", ModelConfig(), "cpu", compilation=compilation, **more)
    return load_plain(directory, context)


@pytest.fixture(scope="module")
def declared(
    tmp_path_factory: pytest.TempPathFactory, processes: CompilerProcesses
) -> tuple[Path, list[str]]:
    """Return the export of `counted`, and its notices."""
    notices: list[str] = []
    path = tmp_path_factory.mktemp("declared") / "m" / "1"
    made = Exportable(counted, None, INPUTS, batch_independent=True, max_batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "_own_processes", lambda seconds: processes)
        return made.write(path, on_notice=notices.append), notices


def test_export_returns_for_a_loop_that_does_not_end_at_infinity(
    declared: tuple[Path, list[str]],
) -> None:
    directory, notices = declared

    assert 4 == manifest.read(directory).max_batch_size
    assert [
        "the trial of its rows did not finish: it did not end in 2 seconds of the processor "
        "(a batch of 4, before rows of infinity)"
    ] == notices


@pytest.mark.slow
def test_export_without_a_declaration_returns_as_well(tmp_path: Path) -> None:
    notices: list[str] = []
    made = Exportable(counted, None, INPUTS)
    directory = made.write(tmp_path / "m" / "1", on_notice=notices.append)

    assert 0 == manifest.read(directory).max_batch_size
    assert "a trial did not end, batch_independent=True declares it" in notices[0]
    assert "(a batch of 4, before rows of infinity)" in notices[1]


def test_rows_that_are_declared_are_served_though_their_trial_does_not_end(
    declared: tuple[Path, list[str]], processes: CompilerProcesses
) -> None:
    """The load logs this within the time limit, and the answers are correct."""
    directory, _ = declared
    with capture_logs() as logs:
        model = loaded(directory, Compilation(processes=processes))
    x = np.array([[8, 1, 3, 0.5], [1, 2, 4, 16]], np.float32)

    (said,) = [line for line in logs if "not fully tested" in line["event"]]
    assert ("warning", "m") == (said["log_level"], said["model"])
    assert "(a batch of 4, before rows of infinity)" in said["reason"]
    assert 4 == model.info.max_batch_size
    for _ in range(3):
        expected = np.array([[1, 1, 0.75, 0.5], [1, 1, 1, 1]], np.float32)
        np.testing.assert_array_equal(expected, model.execute({"x": x})["y"])
    model.close()


def test_export_refuses_what_does_not_end_on_made_up_inputs(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel) as caught:
        export_model(never, None, INPUTS, tmp_path / "m" / "1")

    text = "it did not end in 2 seconds of each core (its first execution, on random numbers)"
    assert text in str(caught.value)
    assert not (tmp_path / "m" / "1").exists()


def test_load_whose_first_execution_does_not_end_fails_and_no_thread_goes_on(
    tmp_path: Path, processes: CompilerProcesses
) -> None:
    directory = export_model(endless, None, {"x": ("FP32", [2])}, tmp_path / "m" / "1")
    with pytest.raises(InvalidModel) as caught:
        loaded(directory, Compilation(processes=processes))

    text = "it did not end in 2 seconds of each core (its first execution, on zeros)"
    assert text in str(caught.value)


def test_loops_are_tried_by_a_process_of_their_own_where_none_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: CompilerProcesses
) -> None:
    """Proved rows are compared there, for `trial_seconds`, and the trial is complete."""
    directory = export_model(steps, PARAMS, INPUTS, tmp_path / "m" / "1", max_batch_size=4)
    settings = Settings(repository=tmp_path, compile_processes=0, trial_seconds=3.0)
    asked: list[float] = []

    def own(seconds: float) -> CompilerProcesses:
        asked.append(seconds)
        return processes

    monkeypatch.setattr(trials, "_own_processes", own)
    with capture_logs() as logs:
        loaded(directory, of_settings(settings)).close()

    assert [3.0] == asked
    assert [] == [line for line in logs if "not fully tested" in line["event"]]


def test_declared_rows_are_tried_for_trial_seconds_where_no_process_compiles(
    declared: tuple[Path, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: CompilerProcesses,
) -> None:
    settings = Settings(repository=tmp_path, compile_processes=0, trial_seconds=3.0)
    asked: list[float] = []

    def own(seconds: float) -> CompilerProcesses:
        asked.append(seconds)
        return processes

    monkeypatch.setattr(trials, "_own_processes", own)
    loaded(declared[0], of_settings(settings)).close()

    assert [3.0] == asked


def test_what_has_loops_is_tried_before_the_server_executes_it_once_for_all_starts(
    tmp_path: Path, processes: CompilerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = export_model(steps, PARAMS, INPUTS, tmp_path / "m" / "1", max_batch_size=4)
    asked: list[Any] = []
    before = trials.tried

    def noted(subject: Any, *given: Any, **more: Any) -> Any:
        asked.append((more["is_compared"], more["first"]))
        return before(subject, *given, **more)

    monkeypatch.setattr(trials, "tried", noted)
    cache = CompilationCache(tmp_path / "cache", 1 << 30)
    cache.prepare("cpu")
    models = [loaded(directory, Compilation(cache, processes=processes)) for _ in range(3)]

    assert [(True, [(1, 4)])] == asked
    for model in models:
        found = model.execute({"x": np.zeros((3, 4), np.float32)})["y"]
        np.testing.assert_array_equal(np.full((3, 4), 1.75, np.float32), found)
        model.close()


def test_wrong_proof_of_what_has_loops_is_seen_in_the_process(
    tmp_path: Path, processes: CompilerProcesses
) -> None:
    """It is seen in the numbers, including NaN."""

    def mixed(params: Any, x: jax.Array) -> dict[str, jax.Array]:
        y = jax.lax.fori_loop(0, 2, lambda _, c: c + x.mean(0, keepdims=True), x)
        return {"y": jnp.where(y > 0, y, jnp.nan)}

    subject = subject_of(mixed)
    outcome = trials.tried(subject, processes, is_thorough=False)

    assert subject.has_loops
    assert outcome.difference is not None
    assert "y" == outcome.difference.output


def subject_of(function: Any) -> trials.Subject:
    """Return an artifact without parameters, with one input FP32[-1,4], as a trial's subject."""
    from xlaserve.tensors import TensorSpec, datatype_named

    (rows,) = jax.export.symbolic_shape("b")
    argument = jax.ShapeDtypeStruct((rows, 4), np.float32)
    exported = jax.export.export(jax.jit(lambda p, a: [function(None, *a)["y"]]))([], [argument])
    fp32 = datatype_named("FP32")
    x, y = (TensorSpec(name, fp32, (-1, 4)) for name in ("x", "y"))
    return trials.Subject("m", "", exported, [x], [y], [])


def test_memory_of_a_trial_is_limited(processes: CompilerProcesses) -> None:
    """The load does not fail, and the process executes the next job."""

    def large(params: Any, x: jax.Array) -> dict[str, jax.Array]:
        return {"y": x[:, :1] + jnp.zeros((1, 1 << 30), jnp.float32)}

    outcome = trials.tried(subject_of(large), processes, is_thorough=False)

    assert outcome.difference is None
    assert "memory" in outcome.unfinished
    assert not outcome.never_began


def test_parameters_beyond_the_memory_of_a_process_are_not_sent(tmp_path: Path) -> None:
    small = CompilerProcesses(replace(LIMITS, bytes=256))
    subject = replace(subject_of(lambda p, x: {"y": x}), leaves=[np.zeros(65, np.uint8)])

    outcome = trials.tried(subject, small, is_thorough=True)

    assert "its parameters have 65 bytes, more than a trial process may use (64)" == (
        outcome.unfinished
    )


def test_verdicts_are_what_they_were_where_a_trial_ends(tmp_path: Path) -> None:
    described = manifest.read(
        export_model(steps, PARAMS, INPUTS, tmp_path / "m" / "1", max_batch_size=4)
    )

    assert described.verdict is not None
    assert Independence.PROVED is described.verdict.independence
    assert 4 == described.max_batch_size
