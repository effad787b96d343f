"""Stepped models with a batch dimension: answers in a batch equal the answers alone."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.stepped import export_counter, step

from xlaserve.artifact import manifest
from xlaserve.authoring import export
from xlaserve.errors import InvalidModel, TooManyAnswers
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.exported.stepped import SteppedModel
from xlaserve.runtime.exported.stepped_rows import Row, SteppedRows
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Answer
from xlaserve.runtime.programs.mappings import Mappings
from xlaserve.runtime.stepping import Stepping

MOST = 4


def asked(start: int, count: int) -> dict[str, Any]:
    return {"start": np.array([start], np.int32), "count": np.array([count], np.int32)}


def load(path: Path, config: ModelConfig | None = None, **fields: Any) -> Any:
    context = LoadContext("counter", "1", config or ModelConfig(), **fields)
    return loaders.load(path, context)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    models = tmp_path_factory.mktemp("models")
    return (
        export_counter(models / "counter" / "1", max_steps=20, max_batch_size=MOST),
        export_counter(models / "alone" / "1", max_steps=20),
    )


@pytest.fixture(scope="module")
def model(directories: tuple[Path, Path]) -> Iterator[SteppedRows]:
    loaded = load(directories[0])
    assert isinstance(loaded, SteppedRows)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def alone(directories: tuple[Path, Path]) -> Iterator[SteppedModel]:
    loaded = load(directories[1])
    assert isinstance(loaded, SteppedModel)
    yield loaded
    loaded.close()


def shown(answer: Answer | Exception) -> Any:
    assert isinstance(answer, Answer)
    outputs = {name: (a.tolist(), a.dtype.name, a.shape) for name, a in answer.outputs.items()}
    return outputs, answer.is_last


def run(model: SteppedRows, rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> list[Any]:
    """Return the answers of each row, for steps in these groups."""
    found: list[Any] = [[] for _ in rows]
    for group in groups:
        for index, answer in zip(group, model.advance([rows[i] for i in group]), strict=True):
            found[index].append(shown(answer))
    return found


GROUPS = {
    "always the same": [[0, 1, 2, 3]] * 4,
    "padded": [[0, 1, 2]] * 3,
    "others": [[0, 1, 2, 3], [3, 1], [0, 2], [2, 0], [1, 3, 0], [3], [2, 1]],
    "begun one after the other": [[0], [1], [0, 1], [2], [2, 0, 1], [3], [3, 2, 1, 0]],
    "alone between": [[0, 1], [0], [1], [0], [0, 1]],
    "in another order": [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]],
}


_LONG = ("begun one after the other", "alone between", "in another order")


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(groups, id=name, marks=[pytest.mark.slow] if name in _LONG else [])
        for name, groups in GROUPS.items()
    ],
)
def test_what_is_answered_together_is_what_each_is_answered_alone(
    model: SteppedRows, alone: SteppedModel, groups: Sequence[Sequence[int]]
) -> None:
    """The random numbers in the state are the same too, as are shapes and datatypes."""
    inputs = [asked(10 * index, 9 + index) for index in range(MOST)]
    found = run(model, [model.generate(one, {}) for one in inputs], groups)
    expected = [
        [shown(answer) for answer, _ in zip(alone.generate(one, {}), answers, strict=False)]
        for one, answers in zip(inputs, found, strict=True)
    ]

    assert isinstance(model, Stepping)
    assert model.most_together == MOST
    assert any(expected)
    assert expected == found


def test_one_request_is_an_iterator(model: SteppedRows, alone: SteppedModel) -> None:
    row = model.generate(asked(3, 3), {})
    found = [shown(next(row)) for _ in range(3)]
    row.close()

    assert [shown(answer) for answer in alone.generate(asked(3, 3), {})] == found
    assert 3 == np.asarray(model.execute(asked(3, 1))["number"]).item()


@pytest.mark.slow
def test_a_request_that_is_not_done_in_time_fails_by_itself(model: SteppedRows) -> None:
    rows = [model.generate(asked(0, count), {}) for count in (50, 50)]
    for _ in range(19):
        model.advance(rows)
    model.advance(rows[:1])
    late, other = model.advance(rows)

    assert isinstance(late, TooManyAnswers)
    assert ([19], False) == (other.outputs["number"].tolist(), other.is_last)  # type: ignore[union-attr]
    assert [TooManyAnswers] * 2 == [type(answer) for answer in model.advance(rows)]
    with pytest.raises(TooManyAnswers, match="after 20 answers"):
        next(rows[0])


def test_who_leaves_leaves_the_others_their_state(model: SteppedRows) -> None:
    """Its own state is released: only the other rows of the batch are kept."""
    rows = [model.generate(asked(index, 9), {}) for index in range(3)]
    model.advance(rows)
    batch = rows[0].batch
    rows[1].close()

    assert ([], ()) == (batch.rows, batch.states)  # type: ignore[union-attr]
    assert [1, 0, 1] == [bool(row.state) for row in rows]
    assert [[1], [3]] == [
        answer.outputs["number"].tolist()  # type: ignore[union-attr]
        for answer in model.advance([rows[0], rows[2]])
    ]
    assert rows[0].state == ()


def test_the_same_requests_are_stepped_in_place(
    model: SteppedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as no request joins or leaves, the batch is neither assembled nor split."""
    rows = [model.generate(asked(index, 9), {}) for index in range(MOST)]
    model.advance(rows)
    made = []
    programs = SteppedRows._programs

    def note(self: SteppedRows, *arguments: Any) -> Any:
        made.append(arguments)
        return programs(self, *arguments)

    monkeypatch.setattr(SteppedRows, "_programs", note)
    for _ in range(5):
        model.advance(rows)
    in_place = len(made)
    model.advance(rows[:2])

    assert (0, 2) == (in_place, len(made))


def test_an_answer_keeps_no_other(model: SteppedRows) -> None:
    answers = model.advance([model.generate(asked(index, 9), {}) for index in range(2)])

    for answer in answers:
        assert isinstance(answer, Answer)
        assert all(tensor.base is None for tensor in answer.outputs.values())


def test_nothing_is_compiled_for_requests(
    model: SteppedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*arguments: Any) -> Any:
        pytest.fail("something was compiled")

    monkeypatch.setattr(SteppedRows, "_compiled", compiled)
    rows = [model.generate(asked(index, 9), {}) for index in range(MOST)]
    for count in (4, 3, 2, 1, 4):
        run(model, rows, [range(count)] if count < MOST else [range(4)])


def test_clients_know_of_no_batch(model: SteppedRows, alone: SteppedModel) -> None:
    """The state counts twice: as a separate row, and as a row of a batch."""
    info, other = model.info, alone.info

    assert (other.inputs, other.outputs) == (info.inputs, info.outputs)
    assert (0, True, 2 * other.state_bytes) == (
        info.max_batch_size,
        info.is_decoupled,
        info.state_bytes,
    )
    inner = model._inner.info.memory.total_bytes
    assert inner + 4 * 2 * (1 << 19) == info.memory.total_bytes
    assert info.memory.total_bytes == sum(info.memory.per_device.values())


def test_a_configuration_may_ask_for_each_by_itself(
    directories: tuple[Path, Path], alone: SteppedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Additional programs are subject to the same memory mapping limit as the model's own."""
    admitted: list[int] = []
    monkeypatch.setattr(Mappings, "admit", lambda self, model, programs: admitted.append(programs))
    loaded = load(directories[0], ModelConfig(is_unbatched=True))
    row = loaded.generate(asked(5, 2), {})
    found = [shown(next(row)), shown(next(row))]
    most = loaded.most_together
    loaded.close()

    assert (1, 1) == (most, admitted.count(2))
    assert [shown(answer) for answer in alone.generate(asked(5, 2), {})] == found


def test_begin_is_not_computed_by_steps_that_go_on(
    directories: tuple[Path, Path], model: SteppedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may process a long prompt: all rows of an execution have begun, or none has."""
    told: list[list[bool]] = []
    execute = JaxExportModel.execute

    def note(self: JaxExportModel, inputs: Any, **options: Any) -> Any:
        told.append(inputs["stream.first"].tolist())
        return execute(self, inputs, **options)

    monkeypatch.setattr(JaxExportModel, "execute", note)
    run(model, [model.generate(asked(0, 9), {}) for _ in range(3)], [[0, 1, 2]] * 2)
    module = (directories[0] / manifest.STABLEHLO).read_bytes()

    assert [[True] * 3, [False] * 3] == told
    assert b"case" in module


# --- exports -----------------------------------------------------------------------------------


@pytest.mark.slow  # exports twice, and tries the first export
def test_what_is_not_proved_is_exported_without_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is as if no batch had been requested; a notice gives the reason."""
    notices: list[str] = []

    @jax.custom_batching.custom_vmap
    def maximum_of_all(sums: jax.Array) -> jax.Array:
        return jnp.max(sums)

    @maximum_of_all.def_vmap
    def _(size: int, batched: Any, sums: jax.Array) -> Any:
        # No rule can prove this, and it adds nothing to finite numbers.
        return 0 * jnp.max(sums) + jnp.max(sums, axis=1), True

    def maximum(params: Any, state: Any, start: jax.Array, count: jax.Array) -> Any:
        following, outputs, done = step(params, state, start, count)
        return following, {**outputs, "x": outputs["sums"] + maximum_of_all(outputs["sums"])}, done

    monkeypatch.setattr(export, "_log_notice", lambda target, told: notices.append(told))
    path = export_counter(tmp_path / "m" / "1", step=maximum, max_batch_size=2)
    described = manifest.read(path)

    assert (0, [1]) == (described.max_batch_size, list(described.inputs[0].shape))
    assert "; requests will not be batched" in notices[0]


@pytest.mark.parametrize("most", [-1, 1 << 20])
def test_a_batch_has_a_size(tmp_path: Path, most: int) -> None:
    with pytest.raises(InvalidModel, match="max_batch_size: expected 0 to 65536, got"):
        export_counter(tmp_path / "m" / "1", max_batch_size=most)


def test_all_tensors_have_a_batch_dimension_or_none(directories: tuple[Path, Path]) -> None:
    described = manifest.read(directories[0])
    unopened = [replace(spec, shape=spec.shape[1:]) for spec in described.inputs]
    steps = described.steps
    assert steps is not None
    steps.check(described.inputs, described.outputs, MOST)
    for inputs in (unopened, [*described.inputs[:-1], unopened[-1]]):
        with pytest.raises(InvalidModel):
            steps.check(tuple(inputs), described.outputs, MOST)
