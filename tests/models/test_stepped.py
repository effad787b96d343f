"""Stepped models: export, load, and answers one by one."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import stepped
from support.stepped import INPUTS, PARAMS, begin, export_counter, step

from xlaserve.artifact import manifest
from xlaserve.authoring.export import load_exportable
from xlaserve.errors import InvalidModel, TooManyAnswers
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.exported.outputs import DeviceTensor
from xlaserve.runtime.exported.stepped import SteppedModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Answer, Generating


def asked(start: int, count: int) -> dict[str, Any]:
    return {"start": np.array([start], np.int32), "count": np.array([count], np.int32)}


def load(path: Path, **parameters: str) -> SteppedModel:
    model = loaders.load(path, LoadContext("counter", "1", ModelConfig(parameters=parameters)))
    assert isinstance(model, SteppedModel)
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_counter(tmp_path_factory.mktemp("models") / "counter" / "1", max_steps=6)


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[SteppedModel]:
    loaded = load(directory)
    yield loaded
    loaded.close()


def expected(start: int, count: int) -> list[Answer]:
    """Return the answers of the plain functions."""
    inputs = [jnp.asarray(tensor) for tensor in asked(start, count).values()]
    state, answers, done = begin(PARAMS, *inputs), [], False
    while not done:
        state, outputs, done = step(PARAMS, state, *inputs)
        answers.append(Answer(outputs, bool(done)))
    return answers


def shown(answers: Iterator[Answer] | list[Answer]) -> list[Any]:
    return [
        ({name: np.asarray(tensor).tolist() for name, tensor in outputs.items()}, last)
        for outputs, last in answers
    ]


def test_each_answer_is_a_step(model: SteppedModel) -> None:
    """Each step starts from the previous one's state; the last one is marked as the last."""
    found = shown(model.generate(asked(3, 4), {}))

    assert shown(expected(3, 4)) == found
    assert [False, False, False, True] == [last for _, last in found]
    assert [[3], [4], [5], [6]] == [outputs["number"] for outputs, _ in found]


def test_requests_have_a_state_of_their_own(model: SteppedModel) -> None:
    """Interleaved requests each start with a new state."""
    first, second = model.generate(asked(1, 3), {}), model.generate(asked(50, 3), {})
    found: list[list[Answer]] = [[], []]
    for _ in range(3):
        found[0] += islice(first, 1)
        found[1] += islice(second, 1)

    assert [shown(expected(1, 3)), shown(expected(50, 3))] == list(map(shown, found))


def test_the_state_stays_on_the_device(
    model: SteppedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the client-visible outputs and the done flag are fetched."""
    fetched: list[tuple[int, ...]] = []
    numpy = DeviceTensor.numpy

    def note(self: DeviceTensor) -> Any:
        fetched.append(self.array.shape)
        return numpy(self)

    monkeypatch.setattr(DeviceTensor, "numpy", note)
    list(model.generate(asked(1, 4), {}))

    assert [(), (1,), (2,), (1,)] * 4 == fetched


def test_clients_know_nothing_of_its_state(model: SteppedModel) -> None:
    info = model.info

    assert ["start", "count"] == [spec.name for spec in info.inputs]
    assert ["number", "sums", "random"] == [spec.name for spec in info.outputs]
    assert (True, 0, 4 + 8 + 8 + 4) == (info.is_decoupled, info.max_batch_size, info.state_bytes)
    assert isinstance(model, Generating)


def test_a_model_that_is_not_done_in_time_fails(directory: Path, model: SteppedModel) -> None:
    answers = model.generate(asked(0, 7), {})
    assert 6 == len(list(islice(answers, 6)))
    with pytest.raises(TooManyAnswers, match=r"'counter' did not finish within 6 answers"):
        next(answers)
    fewer = load(directory, max_steps="2")
    answers = fewer.generate(asked(0, 3), {})
    assert 2 == len(list(islice(answers, 2)))
    with pytest.raises(TooManyAnswers, match="within 2 answers"):
        next(answers)
    fewer.close()


@pytest.mark.parametrize("most", ["0", "7", "-1", "x", "9" * 5000])
def test_a_configuration_allows_no_more_answers_than_the_model(directory: Path, most: str) -> None:
    with pytest.raises(
        InvalidModel, match=r"expected 1 to 6 \(the model's exported maximum\), got '"
    ):
        load(directory, max_steps=most)


def test_a_reference_leads_to_a_stepped_model(tmp_path: Path) -> None:
    """It is found as `xlaserve export FILE.py:NAME` finds it."""
    source = tmp_path / "made.py"
    source.write_text(
        f"import sys\nsys.path.append({str(Path(stepped.__file__).parent.parent)!r})\n"
        "from support.stepped import *\nfrom xlaserve import ExportableStream\n"
        "model = ExportableStream(step, PARAMS, INPUTS, begin, max_steps=3)\n"
    )
    path = load_exportable(f"{source}:model").write(tmp_path / "m" / "1")

    assert 3 == json.loads((path / manifest.FILE_NAME).read_text())["steps"]["max_steps"]


# --- refusals ------------------------------------------------------------------------------------


def _changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step that also changes one part of the state."""

    def changed(params: Any, state: Any, *inputs: jax.Array) -> Any:
        state, outputs, done = step(params, state, *inputs)
        return {**state, **{k: change(state[k]) for k, change in changes.items()}}, outputs, done

    return changed


def _answering(outputs: Any = None, done: Any = None) -> Callable[..., Any]:
    def answering(params: Any, state: Any, *inputs: jax.Array) -> Any:
        state, first, is_done = step(params, state, *inputs)
        return state, outputs or first, is_done if done is None else done

    return answering


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_steps": 0}, "max_steps: expected 1 or more, got 0"),
        (
            {"inputs": {"start": ("INT32", [-1])}},
            ", but a stepped model executes one request at a time and needs fixed sizes",
        ),
        (
            {"inputs": {"start": ("INT32", [1, "s"])}},
            ", but a stepped model executes one request at a time and needs fixed sizes",
        ),
        ({"inputs": {"stream.x": ("INT32", [1])}}, "input 'stream.x': names that start with"),
        ({"begin": lambda params, start, count: {}}, "at least one array, got none"),
        ({"begin": lambda params, start: 0}, "begin cannot be traced"),
        (
            {"begin": lambda *_: jnp.zeros(2, jnp.complex64)},
            "state 'stream.state.0' has dtype complex64",
        ),
        ({"step": _changed(next=lambda x: x[0])}, r"step: expected 'stream.state.2' .* int32\[\]"),
        (
            {"step": _changed(left=lambda x: x.astype(float))},
            r"expected 'stream.state.1' .* float\d\d\[\]",
        ),
        (
            {"step": _changed(left=lambda x: (x, x))},
            "step: expected a state with the tree that begin returned",
        ),
        (
            {"step": _answering(done=jnp.zeros(1, bool))},
            r"expected done as bool\[\], got bool\[1\]",
        ),
        ({"step": _answering(done=jnp.int32(1))}, r"expected done as bool\[\], got int32\[\]"),
        ({"step": _answering({"stream.done": jnp.zeros(1)})}, "output 'stream.done': names that"),
        ({"step": lambda p, s, *i: (s, {})}, r"expected a tuple \(state, outputs, done\)"),
        ({"step": lambda p, s, *i: s}, r"expected a tuple \(state, outputs, done\)"),
    ],
)
def test_what_is_no_stepped_model_is_not_exported(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidModel, match=expected):
        export_counter(tmp_path / "m" / "1", **fields)

    assert not (tmp_path / "m" / "1").exists()


def test_python_s_booleans_and_numbers_will_do(tmp_path: Path) -> None:
    path = export_counter(
        tmp_path / "m" / "1",
        begin=lambda params, start, count: True,
        step=lambda params, state, start, count: (state, {"y": start + 5}, True),
    )
    (answer,) = load(path).generate(asked(2, 1), {})

    assert (7, True) == (answer.outputs["y"][0], answer.is_last)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": {"state": 0, "max_steps": 1}}, "its description of steps is invalid"),
        ({"steps": {"state": 1 << 40, "max_steps": 1}}, "its description of steps is invalid"),
        ({"steps": {"state": 4, "max_steps": 0}}, "its description of steps is invalid"),
        ({"max_batch_size": 4}, "not valid"),
        ({"steps": {"state": 3, "max_steps": 1}}, "its last inputs are not the stepping inputs"),
        ({"steps": {"state": 6, "max_steps": 1}}, "no inputs or no outputs"),
        ({"steps": None}, "is in the artifact|not valid|expected"),
    ],
)
def test_a_manifest_with_other_steps_is_not_loaded(
    directory: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    document = json.loads((directory / manifest.FILE_NAME).read_text()) | change
    (tmp_path / manifest.FILE_NAME).write_text(json.dumps(document))

    if change == {"steps": None}:
        assert manifest.read(tmp_path).steps is None
        return
    with pytest.raises(InvalidModel, match=expected):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "index", "field", "value", "expected"),
    [
        ("inputs", 2, "datatype", "INT32", r"'stream.first' is INT32\[\], expected BOOL"),
        ("outputs", 3, "shape", [1], r"'stream.done' is BOOL\[1\], expected BOOL"),
        ("inputs", 3, "datatype", "FP32", "'stream.state.0' is .* as input, .* as output"),
        ("inputs", 3, "name", "other", "its last inputs are not the stepping inputs"),
        ("outputs", 3, "name", "other", "its last outputs are not the stepping outputs"),
        ("inputs", 0, "shape", [-1], "a stepped model has an input with a dynamic dimension"),
    ],
)
def test_tensors_of_steps_are_what_they_should_be(
    directory: Path, tmp_path: Path, kind: str, index: int, field: str, value: Any, expected: str
) -> None:
    document = json.loads((directory / manifest.FILE_NAME).read_text())
    document[kind][index][field] = value
    (tmp_path / manifest.FILE_NAME).write_text(json.dumps(document))

    with pytest.raises(InvalidModel, match=expected):
        manifest.read(tmp_path)


def test_one_answer_is_the_first(model: SteppedModel) -> None:
    """This serves callers that execute any kind of model."""
    outputs = model.execute(asked(3, 4))

    assert [3] == np.asarray(outputs["number"]).tolist()
    assert INPUTS.keys() == asked(0, 0).keys()
