"""The sequence_batching of a configuration: obeyed to the letter, or refused with its place."""

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config.sequence_batching import Control, ControlKind, SequenceBatching, State
from xlaserve.model_config.text import parse_pbtxt
from xlaserve.tensors import BYTES, DATATYPES

FALSE_TRUE = "int32_false_true: [ 0, 2 ]"
STATE = 'input_name: "h" output_name: "i" data_type: TYPE_FP32 dims: [ 2, 3 ]'
INITIAL = "data_type: TYPE_FP32 dims: [ 2, 3 ]"
X = 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }'


def control(kind: str, rest: str, name: str = "c") -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {rest} }} }}'


def read(text: str, more: str = "") -> SequenceBatching:
    found = parse_pbtxt(f"{more} sequence_batching {{ {text} }}").sequence_batching
    assert found is not None
    return found


def test_a_model_without_it_has_none() -> None:
    assert parse_pbtxt("dynamic_batching {}").sequence_batching is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", SequenceBatching(is_direct=True)),
        ("direct {}", SequenceBatching(is_direct=True)),
        (
            "direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.5 }",
            SequenceBatching(
                is_direct=True, max_queue_delay_microseconds=5, minimum_slot_utilization=0.5
            ),
        ),
        ("oldest {}", SequenceBatching()),
        (
            "oldest { max_candidate_sequences: 9 preferred_batch_size: [ 4, 2 ] "
            "max_queue_delay_microseconds: 7 preserve_ordering: true }",
            SequenceBatching(
                max_candidates=9, preferred_batch_size=(2, 4), max_queue_delay_microseconds=7
            ),
        ),
        (
            "max_sequence_idle_microseconds: 11 oldest {}",
            SequenceBatching(idle_microseconds=11),
        ),
        (
            f"oldest {{}} {control('START', FALSE_TRUE)}",
            SequenceBatching(
                controls=(Control("c", ControlKind.START, DATATYPES["INT32"], (0, 2)),)
            ),
        ),
        (
            f"oldest {{}} {control('READY', 'fp32_false_true: [ -1, 0.5 ]')}",
            SequenceBatching(
                controls=(Control("c", ControlKind.READY, DATATYPES["FP32"], (-1, 0.5)),)
            ),
        ),
        (
            f"oldest {{}} {control('END', 'bool_false_true: [ true, false ]')}",
            SequenceBatching(
                controls=(Control("c", ControlKind.END, DATATYPES["BOOL"], (True, False)),)
            ),
        ),
        (
            f"oldest {{}} {control('CORRID', 'data_type: TYPE_STRING')}",
            SequenceBatching(controls=(Control("c", ControlKind.CORRID, BYTES),)),
        ),
        (
            f"oldest {{}} state {{ {STATE} initial_state {{ {INITIAL} zero_data: true }} }}",
            SequenceBatching(states=(State("h", "i", DATATYPES["FP32"], (2, 3)),)),
        ),
        (
            f'oldest {{}} state {{ {STATE} initial_state {{ {INITIAL} data_file: "f" }} '
            "use_same_buffer_for_input_output: true }",
            SequenceBatching(states=(State("h", "i", DATATYPES["FP32"], (2, 3), "f"),)),
        ),
        (
            f"oldest {{}} state {{ {STATE} use_same_buffer_for_input_output: true "
            "use_growable_memory: true }",
            SequenceBatching(states=(State("h", "i", DATATYPES["FP32"], (2, 3)),)),
        ),
        ("iterative_sequence: true oldest {}", SequenceBatching(is_iterative=True)),
    ],
)
def test_what_is_written_is_read(text: str, expected: SequenceBatching) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("oldest { max_candidate_sequences: -1 }", ".oldest.max_candidate_sequences: expected 0"),
        ("oldest { preferred_batch_size: [ 2, 9 ] }", ".oldest.preferred_batch_size[1]: expected"),
        ("oldest { preferred_batch_size: [ 0 ] }", ".oldest.preferred_batch_size[0]: expected 1"),
        ("direct { minimum_slot_utilization: 1.5 }", ".direct.minimum_slot_utilization: expected"),
        (
            f"state {{ {STATE} use_growable_memory: true }}",
            ".state[0].use_same_buffer_for_input_output: expected true with use_growable_memory",
        ),
        ("control_input { }", ".control_input[0].name: expected a name, got none"),
        ('control_input { name: "c" }', ".control_input[0].control: expected one control, got 0"),
        (
            control("START", ""),
            ".control_input[0].control[0]: expected one of int32_false_true, fp32_false_true, "
            "bool_false_true, got none",
        ),
        (
            control("START", f"{FALSE_TRUE} fp32_false_true: [ 0, 1 ]"),
            ".control_input[0].control[0]: expected one of",
        ),
        (
            control("START", "int32_false_true: [ 0 ]"),
            ".control_input[0].control[0].int32_false_true: expected two numbers",
        ),
        (
            control("END", "fp32_false_true: [ 0, nan ]"),
            ".control_input[0].control[0].fp32_false_true: expected two numbers",
        ),
        (
            control("CORRID", "data_type: TYPE_FP32"),
            ".control_input[0].control[0].data_type: expected one of TYPE_INT32, TYPE_INT64",
        ),
        (control("CORRID", ""), ".control_input[0].control[0].data_type: expected one of"),
        (
            control("CORRID", f"data_type: TYPE_INT32 {FALSE_TRUE}"),
            ".control_input[0].control[0].int32_false_true: expected none",
        ),
        (
            f"{control('END', FALSE_TRUE)} {control('END', FALSE_TRUE, 'd')}",
            ".control_input: expected one CONTROL_SEQUENCE_END, got 2",
        ),
        (
            f"{control('END', FALSE_TRUE)} {control('START', FALSE_TRUE)}",
            ': expected one source of input "c", got 2',
        ),
        (control("END", FALSE_TRUE, "x"), ': expected one source of input "x", got 2'),
        (f"state {{ {STATE.replace('h', 'x')} }}", ': expected one source of input "x", got 2'),
        (
            f"state {{ {STATE} }} state {{ {STATE.replace('h', 'j')} }}",
            ': expected one source of output "i", got 2',
        ),
        ('state { output_name: "i" }', ".state[0].input_name: expected a name"),
        ('state { input_name: "h" }', ".state[0].output_name: expected a name"),
        (
            f"state {{ {STATE.replace('TYPE_FP32', 'TYPE_STRING')} }}",
            ".state[0].data_type: expected numbers (for texts, a Python model that keeps them)",
        ),
        (
            f"state {{ {STATE.replace(', 3', ', -1')} }}",
            ".state[0].dims[1]: expected a size above 0",
        ),
        (
            f"state {{ {STATE} initial_state {{ {INITIAL} }} }}",
            ".state[0].initial_state[0]: expected zero_data true, or a data_file, got neither",
        ),
        (
            f"state {{ {STATE} initial_state {{ {INITIAL.replace(', 3', '')} zero_data: true }} }}",
            ".state[0].initial_state[0].dims: expected [2, 3] like its state",
        ),
        (
            f"state {{ {STATE} initial_state {{ dims: [ 2, 3 ] zero_data: true }} }}",
            ".state[0].initial_state[0].data_type: expected TYPE_FP32",
        ),
        (
            f'state {{ {STATE} initial_state {{ {INITIAL} data_file: "../f" }} }}',
            ".state[0].initial_state[0].data_file: expected the name of a file",
        ),
        (
            f'state {{ {STATE} initial_state {{ {INITIAL} data_file: ".." }} }}',
            ".state[0].initial_state[0].data_file: expected the name of a file",
        ),
        (
            f"state {{ {STATE} {2 * f' initial_state {{ {INITIAL} zero_data: true }}'} }}",
            ".state[0].initial_state: expected one at most, got 2",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused(text: str, error: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read(text, f"max_batch_size: 8 {X}")

    assert str(caught.value).startswith(f"config: sequence_batching{error}")


@pytest.mark.parametrize(
    ("text", "rows", "slots"),
    [("direct {}", 8, 8), ("direct {}", 0, 1), ("oldest {}", 4, 4)]
    + [("oldest { max_candidate_sequences: 3 }", rows, 3) for rows in (0, 8)],
)
def test_slots_follow_the_strategy(text: str, rows: int, slots: int) -> None:
    found = read(f"{text} state {{ {STATE} }}")

    assert found.slots(rows) == slots
    assert found.states_bytes(rows) == slots * 6 * 4


def test_controls_and_states_are_tensors_of_the_artifact() -> None:
    """Not of what lists none: the artifact has them all."""
    text = f"oldest {{}} {control('START', FALSE_TRUE)} state {{ {STATE} }}"
    config = parse_pbtxt(f"{X} sequence_batching {{ {text} }}").of_artifact()

    assert [(tensor.name, tensor.dims) for tensor in config.inputs] == [
        ("x", (4,)),
        ("c", (1,)),
        ("h", (2, 3)),
    ]
    assert config.outputs == ()
