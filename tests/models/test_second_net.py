"""Proved programs are also executed: a difference refutes the proof, and is logged as an error."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.plain_models import load_plain

from xlaserve.artifact import manifest
from xlaserve.authoring import lowering
from xlaserve.authoring.export import export_model
from xlaserve.authoring.lowering import PLATFORMS
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs import neighbours, tolerances
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import proving, second_net
from xlaserve.runtime.programs.program_table import Program
from xlaserve.runtime.programs.second_net import within
from xlaserve.runtime.programs.shared_programs import SharedPrograms
from xlaserve.tensors import Tensor

Function = Callable[..., Any]
LOUD = "row proof contradicted"
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def of_places(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """Depend on the batch size, by which a constant table is cut."""
    return {"y": x + jnp.arange(x.shape[0], dtype=x.dtype)[::-1, None]}


WRONG: Mapping[str, Function] = {
    "mean": lambda p, x: {"y": x - x.mean(0, keepdims=True)},
    "places from the end": of_places,
    "the next row": lambda p, x: {"y": x + jnp.roll(x, 1, 0)},
    "the largest": lambda p, x: {"y": x / abs(x).max()},
    "the first row, faintly": lambda p, x: {"y": x + 0.001 * x[:1]},
}
RIGHT: Mapping[str, Function] = {
    "plain": lambda p, x: {"y": x @ p["w"]},
    "softmax": lambda p, x: {"y": jax.nn.softmax(x @ p["w"])},
    "argmax": lambda p, x: {"y": jnp.argmax(x @ p["w"], 1)[:, None]},
    "in bfloat16": lambda p, x: {
        "y": (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)
    },
    "quantized": lambda p, x: {"y": jnp.round(x * 127).astype(jnp.int8).astype(jnp.float32) / 127},
    "NaN": lambda p, x: {"y": jnp.log(x) * p["w"][:1]},
}
PARAMS = {"w": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Simulate a wrong rule: everything is proved, at export and at load."""

    def planted() -> None:
        def proved(*_: Any, **__: Any) -> Verdict:
            return Verdict(Independence.PROVED)

        def proved_on_each(*_: Any, **__: Any) -> dict[str, Verdict]:
            return {name: proved() for name in PLATFORMS}

        monkeypatch.setattr(lowering, "prove_each", proved_on_each)
        monkeypatch.setattr(proving, "prove", proved)

    return planted


def exported(function: Function, path: Path, **more: Any) -> Path:
    return export_model(
        function, PARAMS, {"x": ("FP32", [-1, 4])}, path / "1", max_batch_size=8, **more
    )


def believed(directory: Path) -> Path:
    """Change a manifest to 8 rows, as if the author's export had believed the proof."""
    text = (directory / manifest.FILE_NAME).read_text()
    (directory / manifest.FILE_NAME).write_text(
        text.replace('"max_batch_size": 0', '"max_batch_size": 8')
    )
    return directory


def loaded(directory: Path, **more: Any) -> JaxExportModel:
    return load_plain(directory, LoadContext("m", "1", ModelConfig(), "cpu", **more))


def answers(model: JaxExportModel, x: Tensor) -> Tensor:
    """Execute rows as a request does; their number may need its own program."""
    on_demand = model.on_demand
    assert on_demand is not None
    shape = on_demand.shape_of({"x": x})
    assert shape is not None
    program = on_demand.find(shape) or on_demand.compile(shape)
    return np.asarray(program.execute({"x": x})["y"])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_proof_is_refused_at_export_and_said_aloud(
    plant: Callable[[], None], tmp_path: Path, name: str
) -> None:
    plant()
    with capture_logs() as logs:
        directory = exported(WRONG[name], tmp_path / "m")

    described = manifest.read(directory)
    assert [LOUD] == [line["event"] for line in logs if line["log_level"] == "error"]
    assert 0 == described.max_batch_size
    assert described.verdict is not None
    assert Independence.UNKNOWN is described.verdict.independence
    assert described.verdict.reason.startswith("a trial contradicts the proof, please report")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_proof_is_refused_at_load_which_goes_on(
    plant: Callable[[], None], tmp_path: Path, name: str
) -> None:
    """Requests are executed unbatched, with correct results, three times; an error is logged."""
    directory = believed(exported(WRONG[name], tmp_path / "m", batch_independent=None))
    plant()
    with capture_logs() as logs:
        model = loaded(directory)
    expected = np.asarray(WRONG[name](PARAMS, jnp.asarray(X))["y"])

    errors = [line for line in logs if line["log_level"] == "error"]
    assert [(LOUD, "m")] == [(line["event"], line["model"]) for line in errors]
    assert "report this" in errors[0]["to_do"]
    assert 0 == model.batch_limit
    assert "a trial contradicts the proof" in model.info.notice
    assert model.info.verdict is not None
    assert Independence.UNKNOWN is model.info.verdict.independence
    for _ in range(3):
        np.testing.assert_allclose(answers(model, X), expected, rtol=1e-5)
    model.close()


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_proved_rightly_stays_batched(tmp_path: Path, name: str) -> None:
    """Rounding differences do not matter."""
    with capture_logs() as logs:
        model = loaded(exported(RIGHT[name], tmp_path / "m"))

    assert [] == [line for line in logs if line["event"] == LOUD]
    assert 8 == model.info.max_batch_size
    assert 0 < model.batch_limit
    model.close()


def test_declared_rows_that_a_trial_refutes_are_not_exported(
    plant: Callable[[], None], tmp_path: Path
) -> None:
    plant()
    with pytest.raises(InvalidModel, match="declared independent, but they are not: unknown: a tr"):
        exported(WRONG["mean"], tmp_path / "m", batch_independent=True)


def test_a_computation_is_tried_once_for_all_of_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    before = neighbours.find_contradiction

    def counted(*given: Any, **more: Any) -> Any:
        tried.append(1)
        return before(*given, **more)

    directories = [exported(RIGHT["plain"], tmp_path / str(n)) for n in range(4)]
    monkeypatch.setattr(neighbours, "find_contradiction", counted)
    programs = SharedPrograms()
    models = [loaded(directory, programs=programs) for directory in directories]

    assert 1 == len(tried)
    for model in models:
        model.close()


def test_second_model_of_a_refused_computation_is_refused_as_well(
    plant: Callable[[], None], tmp_path: Path
) -> None:
    directories = [believed(exported(WRONG["mean"], tmp_path / str(n))) for n in range(2)]
    plant()
    programs = SharedPrograms()
    models = [loaded(directory, programs=programs) for directory in directories]

    assert [0, 0] == [model.batch_limit for model in models]
    for model in models:
        model.close()


def test_it_is_run_on_the_programs_that_are_served(tmp_path: Path) -> None:
    """It runs at two sizes, and compiles nothing."""
    model = loaded(exported(RIGHT["plain"], tmp_path / "m"))
    programs = model._by_replica[0].table.programs

    assert model.info.compiled_programs == len(programs)
    assert [1, 3, 8] == [program.rows for program in within(programs, 10.0)]
    model.close()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(100.0, [1, 4, 32]), (15.0, [1, 4, 8]), (6.0, [1, 4]), (3.0, [])],
)
def test_what_takes_too_long_is_left_out_largest_first(seconds: float, expected: list[int]) -> None:
    """A single row takes 1 second and runs three times; each batch runs twice."""
    programs = [
        Program(lambda leaves, arrays: [], rows, (), time)
        for rows, time in ((1, 1.0), (4, 1.5), (8, 3.0), (32, 12.0))
    ]

    assert expected == [program.rows for program in within(programs, seconds)]


def test_a_program_that_may_not_be_executed_is_not() -> None:
    """Its loops depend on inputs, so it was not measured."""
    programs = [Program(lambda leaves, arrays: [], rows, (), float("inf")) for rows in (1, 8)]

    assert [] == within(programs, second_net.MAX_SECONDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor<2x3xf32>", 1e-4),
        ("tensor<f64>", 1e-9),
        ("tensor<?x3xbf16>, tensor<4xf32>", 5e-2),
        ("tensor<4xf32>, tensor<4xf16>", 2e-2),
        ("tensor<4xi8>, tensor<4xf16>", 0.1),
        ("tensor<4xf8E4M3FN>, tensor<4xbf16>", 0.25),
        ("tensor<4xi32>, tensor<4xf32>", 1e-4),
    ],
)
def test_tolerance_is_that_of_the_narrowest_type_on_the_way(text: str, expected: float) -> None:
    assert expected == tolerances.of_module(text)
