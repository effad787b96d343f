"""A recurrent JAX model: controls and states are filled in by row and slot."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from support.sequence_models import configure, export_fold, folded

import xlaserve
from xlaserve.errors import InvalidModel, InvalidParameter, OutOfMappings, OutOfMemory
from xlaserve.errors.sequence import StatesLost
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.exported.outputs import JaxInFlight
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs.mappings import Mappings
from xlaserve.runtime.sequential import Sequential, Step
from xlaserve.runtime.wrappers import states as states_module
from xlaserve.runtime.wrappers.sequence_model import SequenceModel

SIZES = 'parameters { key: "batch_sizes" value { string_value: "1,4" } }'
TWO = 'parameters { key: "devices" value { string_value: "0,1" } }'
SLOTS = 6
OLDEST = f"oldest {{ max_candidate_sequences: {SLOTS} }}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model that folds its inputs; each test writes its configuration."""
    made = tmp_path_factory.mktemp("models")
    export_fold(made, max_batch_size=4)
    return made


def loaded(root: Path, name: str = "fold", **context: Any) -> SequenceModel:
    config = read_config(root / name)
    model = loaders.load(root / name / "1", LoadContext(name, "1", config, **context))
    assert isinstance(model, Sequential)
    assert isinstance(model, SequenceModel)
    return model


def written(root: Path, **config: Any) -> SequenceModel:
    settings: dict[str, Any] = {"strategy": OLDEST, "more": SIZES, "max_batch_size": 4}
    configure(root, **settings | config)
    return loaded(root)


@pytest.fixture
def model(root: Path) -> Iterator[SequenceModel]:
    made = written(root)
    yield made
    made.close()


def stepped(
    model: SequenceModel, values: Sequence[int], steps: Sequence[Step], replica: int = 0
) -> list[int]:
    """Take a step, and return the new states of all rows."""
    inputs = {"x": np.array(values, np.int32)[:, None]}
    return [int(y) for y in model.step(inputs, steps, replica=replica)["y"][:, 0]]


def start(slot: int) -> Step:
    return Step(slot, is_start=True, id=slot + 1)


NOBODY = Step(0, is_ready=False)


def test_rows_have_the_states_of_their_slots(model: SequenceModel) -> None:
    """The position of a row in the batch does not matter."""
    stepped(model, [1, 2, 3, 4], [start(slot) for slot in range(4)])
    found = stepped(model, [5, 6, 7, 8], [Step(slot) for slot in (3, 1, 0, 2)])

    assert found == [folded(of) for of in ([4, 5], [2, 6], [1, 7], [3, 8])]


def test_what_a_load_left_out_is_compiled_behind_it(root: Path) -> None:
    """Afterwards, batches of that size can read the states."""
    configure(root, strategy=OLDEST, more=SIZES.replace("1,4", "1,2,4"), max_batch_size=4)
    model = loaded(root, background_compile=True)
    before = model.padded_rows(2)
    model.compile_rest()
    after = model.padded_rows(2)
    model.close()

    assert (before, after) == (4, 2)


@pytest.mark.parametrize("position", range(4))
def test_a_start_counts_for_its_row_alone(model: SequenceModel, position: int) -> None:
    stepped(model, [1] * 4, [start(slot) for slot in range(4)])
    steps = [start(slot) if slot == position else Step(slot) for slot in range(4)]
    found = stepped(model, [2] * 4, steps)
    told = model.step({"x": np.zeros((4, 1), np.int32)}, steps)["told"]

    assert found == [folded([2]) if slot == position else folded([1, 2]) for slot in range(4)]
    assert [int(row[0]) for row in told] == [int(slot == position) for slot in range(4)]


@pytest.mark.parametrize("real", range(4))
def test_padding_touches_no_state(model: SequenceModel, real: int) -> None:
    """A padding row has the slot of a sequence, and an input that would change its state."""
    stepped(model, [1] * 4, [start(slot) for slot in range(4)])
    steps = [NOBODY] * 4
    steps[real] = Step(3, is_end=True, id=9)
    outputs = model.step({"x": np.full((4, 1), 50, np.int32)}, steps)
    found = stepped(model, [2] * 4, [Step(slot) for slot in range(4)])

    assert found == [folded([1, 2])] * 3 + [folded([1, 50, 2])]
    assert outputs["told"].tolist() == [[0, 1, 1] if row == real else [0, 0, 0] for row in range(4)]
    assert outputs["id"].ravel().tolist() == [9 if row == real else 0 for row in range(4)]


def test_replicas_have_states_of_their_own(root: Path) -> None:
    model = written(root, more=SIZES + TWO)
    for replica in (0, 1):
        stepped(model, [replica + 1], [start(2)], replica)
    found = [stepped(model, [7], [Step(2)], replica) for replica in (0, 1)]
    memory = model.info.memory
    model.close()

    assert found == [[folded([1, 7])], [folded([2, 7])]]
    assert memory.states_bytes == 2 * SLOTS * 8
    assert {name for name, held in memory.per_device.items() if held} == {"cpu:0", "cpu:1"}
    assert sum(memory.per_device.values()) == memory.total_bytes


def test_what_is_predicted_has_the_states(root: Path) -> None:
    configure(root, strategy="oldest { max_candidate_sequences: 50000 }", max_batch_size=4)
    config = read_config(root / "fold")
    (with_states,) = loaders.predict_size(root / "fold" / "1", config).values()
    configure(root, strategy=OLDEST, max_batch_size=4)
    (few,) = loaders.predict_size(root / "fold" / "1", read_config(root / "fold")).values()

    assert with_states - few == (50_000 - SLOTS) * 8


def test_no_batch_waits_for_programs_that_read_its_states(root: Path) -> None:
    """A size deferred by the load is used only once the program that reads the states exists."""
    sizes = SIZES.replace("1,4", "1,2,4")
    configure(root, strategy=OLDEST, more=sizes, max_batch_size=4)
    model = loaded(root, background_compile=True)
    first = [model.padded_rows(rows) for rows in (1, 2, 3)]
    model._inner.compile_rest()
    between = model.padded_rows(2)
    before = model.info.memory.total_bytes
    model.prepare()
    after = model.padded_rows(2)
    found = stepped(model, [1, 2], [start(0), start(1)])
    grown = model.info.memory.total_bytes > before
    model.close()

    assert first == [1, 4, 4]
    assert (between, after) == (4, 2)
    assert found == [1, 2]
    assert grown


def test_programs_of_states_are_admitted_as_others_are(root: Path) -> None:
    """Linux ends a process that has too many memory mappings."""

    class Refusing(Mappings):
        def admit(self, model: str, programs: int = 1) -> None:
            if programs == 2:
                raise OutOfMappings(model, 2, 1, 1, 1)

    configure(root, strategy=OLDEST, more=SIZES.replace("1,4", "4"), max_batch_size=4)
    with pytest.raises(OutOfMappings):
        loaded(root, mappings=Refusing(1))


# --- initial states ------------------------------------------------------------------------------

INITIAL = 'initial_state { data_type: TYPE_INT64 dims: [ 1 ] data_file: "begin" }'


def test_a_sequence_begins_with_what_a_file_says(root: Path) -> None:
    directory = root / "fold" / "initial_state"
    directory.mkdir(exist_ok=True)
    (directory / "begin").write_bytes(np.int64(5).tobytes())
    model = written(root, initial=INITIAL)
    found = stepped(model, [1], [start(0)])
    model.close()

    assert found == [folded([1], 5)]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "initial_state/begin cannot be read: No such file"),
        (b"", r"expected 8 bytes for INT64\[1\], got 0"),
        (b"x" * 9, r"expected 8 bytes for INT64\[1\], got more"),
    ],
)
def test_a_file_that_is_no_initial_state_fails_the_load(
    root: Path, data: bytes | None, problem: str
) -> None:
    file = root / "fold" / "initial_state" / "begin"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(InvalidModel, match=problem):
        written(root, initial=INITIAL)


def test_a_state_that_the_configuration_lists_is_returned(root: Path) -> None:
    outputs = 'output { name: "h_next" data_type: TYPE_INT64 dims: [ 1 ] }'
    others = (
        'output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }'
        'output { name: "told" data_type: TYPE_INT32 dims: [ 3 ] }'
        'output { name: "id" data_type: TYPE_UINT64 dims: [ 1 ] }'
        'input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }'
    )
    model = written(root, more=SIZES + others)
    hidden = [spec.name for spec in model.info.outputs]
    model.close()
    model = written(root, more=SIZES + others + outputs)
    shown = model.step({"x": np.ones((1, 1), np.int32)}, [start(0)])
    model.close()

    assert hidden == ["y", "told", "id"]
    assert shown["h_next"].tolist() == shown["y"].tolist() == [[1]]


def test_a_model_without_a_batch_dimension_has_states(tmp_path: Path) -> None:
    """Each request is executed by itself, in its sequence's slot."""
    xlaserve.export_model(
        lambda p, x, s, h: {"y": h.sum() + x, "h_next": h + x.reshape(1, 1)},
        {},
        {"x": ("FP32", [1]), "START": ("INT32", [1]), "h": ("FP32", [2, 3])},
        tmp_path / "whole" / "1",
    )
    (tmp_path / "whole" / "config.pbtxt").write_text("""
sequence_batching {
  oldest { max_candidate_sequences: 2 }
  control_input {
    name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }
  }
  state { input_name: "h" output_name: "h_next" data_type: TYPE_FP32 dims: [ 2, 3 ] }
}
""")
    model = loaded(tmp_path, "whole")
    one = {"x": np.ones(1, np.float32)}
    found = [
        model.step(one, [step])["y"].tolist()
        for step in (start(0), start(1), Step(1), Step(0), Step(0), start(0))
    ]
    model.close()

    assert found == [[1], [1], [7], [7], [13], [1]]


# --- failures ------------------------------------------------------------------------------------


def test_an_execution_that_fails_changes_no_state(
    model: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped(model, [1], [start(0)])

    def fail(*_: Any) -> Any:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(JaxExportModel, "called", fail)
        with pytest.raises(ArithmeticError):
            stepped(model, [2], [Step(0)])

    assert stepped(model, [3], [Step(0)]) == [folded([1, 3])]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), JaxRuntimeError("RESOURCE_EXHAUSTED: out of 8 bytes")],
)
@pytest.mark.parametrize(
    "place",
    [
        (JaxExportModel, "called"),
        (states_module, "to_host"),
        (jax, "block_until_ready"),
    ],
    ids=["the execution", "an output", "the next state"],
)
def test_memory_that_runs_out_in_a_step_is_said_and_changes_no_state(
    model: SequenceModel, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], error: Exception
) -> None:
    stepped(model, [1], [start(0)])

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(OutOfMemory, match="'fold'"):
            stepped(model, [2], [Step(0)])

    assert stepped(model, [3], [Step(0)]) == [folded([1, 3])]


def test_states_that_could_not_be_written_are_lost_and_may_begin_again(
    model: SequenceModel,
) -> None:
    stepped(model, [1], [start(0)])
    assert model._states is not None
    (pool,) = model._states._pools
    scatter = pool.scatters[1]

    def consume(arrays: Any, *_: Any) -> Any:
        for array in arrays:
            array.delete()  # as if it had been donated
        raise ArithmeticError

    broken: Any = consume
    pool.scatters[1] = broken
    with pytest.raises(StatesLost):
        stepped(model, [2], [Step(0)])
    pool.scatters[1] = scatter

    assert stepped(model, [3], [start(0)]) == [3]
    assert stepped(model, [4], [Step(0)]) == [folded([3, 4])]


def test_nothing_is_left_of_states_that_are_closed(root: Path) -> None:
    model = written(root)
    stepped(model, [1], [start(0)])
    assert model._states is not None
    arrays = [weakref.ref(array) for pool in model._states._pools for array in pool.arrays]
    model.close()
    gc.collect()

    assert arrays
    assert [array() for array in arrays] == [None] * len(arrays)


# --- on accelerators, simulated by the CPU -------------------------------------------------------


@pytest.fixture
def dispatched(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SequenceModel]:
    monkeypatch.setattr(Site, "is_accelerator", True)
    made = written(root)
    yield made
    made.close()


def dispatch(model: SequenceModel, value: int, *steps: Step) -> Any:
    inputs = {"x": np.full((len(steps), 1), value, np.int32)}
    return model.dispatch_step(inputs, steps)


def test_steps_are_dispatched_one_behind_the_other(dispatched: SequenceModel) -> None:
    """A step is dispatched before anyone has waited for the previous one."""
    flights = [
        dispatch(dispatched, 1, start(0), start(1), NOBODY, NOBODY),
        dispatch(dispatched, 2, Step(1)),
        dispatch(dispatched, 3, Step(1), Step(0), NOBODY, NOBODY),
    ]
    found = [np.asarray(flight.fetch()["y"]).ravel().tolist() for flight in flights]

    assert [found[0][:2], found[1], found[2][:2]] == [
        [1, 1],
        [folded([1, 2])],
        [folded([1, 2, 3]), folded([1, 3])],
    ]


def test_an_execution_that_fails_behind_its_dispatch_loses_the_states_once(
    dispatched: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps dispatched on the lost states fail too; sequences that began meanwhile are kept."""
    dispatch(dispatched, 1, start(0)).fetch()
    first, second = dispatch(dispatched, 2, Step(0)), dispatch(dispatched, 3, Step(0))

    def fail(_: Any) -> Any:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(JaxInFlight, "fetch", fail)
        with pytest.raises(StatesLost):
            first.fetch()
        begun = dispatch(dispatched, 5, start(0))
        with pytest.raises(ArithmeticError):
            second.fetch()

    assert begun.fetch()["y"].tolist() == [[5]]
    assert dispatch(dispatched, 6, Step(0)).fetch()["y"].tolist() == [[folded([5, 6])]]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"strategy": "oldest { max_candidate_sequences: 70000 }"},
            "70000 concurrent sequences requested",
        ),
        (
            {"more": 'parameters { key: "batch_sizes" value { string_value: "1,4" } }', "wrong": 1},
            "'missing' is not in the model, it has 'x', 'START'",
        ),
        (
            {"wrong": 2},
            r"control 'x': expected the model's input to be INT64\[-1,1\], got INT32\[-1,1\]",
        ),
        ({"wrong": 3}, r"state 'h': expected the model's input to be INT64\[-1,2\], got"),
    ],
)
def test_what_does_not_fit_the_model_fails_its_load(
    root: Path, config: dict[str, Any], problem: str
) -> None:
    changes = {
        1: ('name: "CORRID"', 'name: "missing"'),
        2: (
            'name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64',
            'name: "x" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64',
        ),
        3: ("dims: [ 1 ]", "dims: [ 2 ]"),
    }
    wrong = config.pop("wrong", 0)
    settings: dict[str, Any] = {"strategy": OLDEST, "more": SIZES, "max_batch_size": 4}
    configure(root, **settings | config)
    if wrong:
        file = root / "fold" / "config.pbtxt"
        before, after = changes[wrong]
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
    with pytest.raises(InvalidModel, match=problem):
        loaded(root)


@pytest.mark.parametrize("id", ["a", "7", -1, 2**64])
def test_an_id_that_corrid_cannot_hold_is_refused(model: SequenceModel, id: Any) -> None:
    model.check_id(2**64 - 1)
    with pytest.raises(
        InvalidParameter, match=r"since the control 'CORRID' of model 'fold' is UIN"
    ):
        model.check_id(id)
