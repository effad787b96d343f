import json
from typing import Any

import betterproto
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.model_config.json_form import DEPTH, read_json
from xlaserve.model_config.schema import MESSAGES, BadConfig, schema_of
from xlaserve_proto import inference

CONFIG = schema_of(inference.ModelConfig)


def _read(value: object) -> Any:
    return read_json(json.dumps(value), CONFIG)


def _refused(text: str) -> str:
    with pytest.raises(BadConfig) as caught:
        read_json(text, CONFIG)
    return str(caught.value)


@pytest.mark.parametrize("key", ["max_batch_size", "maxBatchSize"])
@pytest.mark.parametrize("spelling", ["16", '"16"', "1.6e1", "16.0", '"16.0"', '"1.6e+1"'])
def test_integer_may_be_spelled_as_proto_json_allows(key: str, spelling: str) -> None:
    message: Any = read_json(f'{{"{key}": {spelling}}}', CONFIG)

    assert 16 == message.max_batch_size


@pytest.mark.parametrize(
    ("spelling", "got"),
    [
        ("true", "true"),
        ("1.5", "1.5"),
        ('"1.5"', '"1.5"'),
        ('""', '""'),
        ('" 16"', '" 16"'),
        ('"016"', '"016"'),
        ('"+16"', '"+16"'),
        ('"1_6"', '"1_6"'),
        ('"0x10"', '"0x10"'),
        ('"\u0661"', '"\\u0661"'),
        ("2147483648", "2147483648"),
        ("-2147483649", "-2147483649"),
        ('"2147483648"', "2147483648"),
        ("1e50", "1e+50"),
        ("1e999", "a number of more than 60 digits"),
        ("9" * 99, "a number of more than 60 digits"),
        ("9" * 5000, "a number of more than 60 digits"),
        ("[16]", "a list"),
        ("{}", "an object"),
    ],
)
def test_other_spelling_of_an_integer_is_refused(spelling: str, got: str) -> None:
    expected = f"max_batch_size: expected an int32, got {got}"

    assert expected == _refused(f'{{"max_batch_size": {spelling}}}')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue_delay_microseconds", 2**64 - 1),
        ("max_queue_delay_microseconds", str(2**64 - 1)),
    ],
)
def test_uint64_is_exact(field: str, value: object) -> None:
    message = _read({"dynamic_batching": {field: value}})

    assert 2**64 - 1 == message.dynamic_batching.max_queue_delay_microseconds


def test_negative_unsigned_integer_is_refused() -> None:
    text = '{"version_policy": {"latest": {"num_versions": -1}}}'

    assert "version_policy.latest.num_versions: expected a uint32, got -1" == _refused(text)


def test_integer_written_as_a_float_too_large_to_be_exact_is_refused() -> None:
    text = '{"dynamic_batching": {"max_queue_delay_microseconds": 9007199254740993.0}}'

    assert "expected a uint64" in _refused(text)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [("1", 1.0), ('"0.5"', 0.5), ("-2.5e-1", -0.25), ('"Infinity"', float("inf"))],
)
def test_float_may_be_spelled_as_proto_json_allows(spelling: str, expected: float) -> None:
    text = f'{{"sequence_batching": {{"direct": {{"minimumSlotUtilization": {spelling}}}}}}}'
    message: Any = read_json(text, CONFIG)

    assert expected == message.sequence_batching.direct.minimum_slot_utilization


@pytest.mark.parametrize(
    "spelling", ["NaN", "Infinity", "-Infinity", '"nan"', '"inf"', "1e39", "1e999", '"1e999"', "[]"]
)
def test_other_spelling_of_a_float_is_refused(spelling: str) -> None:
    _refused(f'{{"sequence_batching": {{"direct": {{"minimumSlotUtilization": {spelling}}}}}}}')


def test_float_holds_the_nearest_single() -> None:
    message = _read({"sequence_batching": {"direct": {"minimum_slot_utilization": 0.1}}})

    assert 0.10000000149011612 == message.sequence_batching.direct.minimum_slot_utilization


@pytest.mark.parametrize("spelling", ["TYPE_FP32", 11, 11.0])
def test_enum_is_a_name_or_a_number(spelling: object) -> None:
    message = _read({"input": [{"data_type": spelling}]})

    assert inference.DataType.TYPE_FP32 == message.input[0].data_type


@pytest.mark.parametrize("spelling", ["FP32", "type_fp32", "11", 15, -1, 11.5, True, [], 10**400])
def test_unknown_enum_value_is_refused(spelling: object) -> None:
    assert _refused(json.dumps({"input": [{"data_type": spelling}]})).startswith(
        "input[0].data_type: expected"
    )


@pytest.mark.parametrize("value", [1, "true", None])
def test_only_true_and_false_are_booleans(value: object) -> None:
    if value is None:
        assert not _read({"response_cache": {"enable": value}}).response_cache.enable
    else:
        assert "response_cache.enable: expected true or false" in _refused(
            json.dumps({"response_cache": {"enable": value}})
        )


@pytest.mark.parametrize("spelling", ["-_8=", "+/8=", "-_8", "+/8"])
def test_bytes_are_base64_of_either_alphabet_padded_or_not(spelling: str) -> None:
    schema = schema_of(inference.InferTensorContents)

    contents: Any = read_json(json.dumps({"bytes_contents": [spelling]}), schema)

    assert [b"\xfb\xff"] == contents.bytes_contents


@pytest.mark.parametrize("spelling", ["a", "ab c", "a===b", "\u00e9"])
def test_other_base64_is_refused(spelling: str) -> None:
    with pytest.raises(BadConfig, match="expected base64"):
        read_json(
            json.dumps({"bytes_contents": [spelling]}), schema_of(inference.InferTensorContents)
        )


def test_null_is_absent() -> None:
    message = _read({"name": None, "input": None, "parameters": None, "versionPolicy": None})

    assert not betterproto.serialized_on_wire(message.version_policy)
    assert inference.ModelConfig() == message


@pytest.mark.parametrize("value", [{"input": [None]}, {"parameters": {"a": None}}])
def test_null_inside_a_list_or_a_map_is_refused(value: object) -> None:
    assert "got null" in _refused(json.dumps(value))


def test_empty_object_is_a_present_message() -> None:
    message = _read({"version_policy": {"all": {}}})

    assert "all" == betterproto.which_one_of(message.version_policy, "policy_choice")[0]
    assert betterproto.serialized_on_wire(_read({"optimization": {}}).optimization)


def test_two_members_of_a_oneof_are_refused() -> None:
    text = '{"version_policy": {"all": {}, "latest": {"num_versions": 2}}}'

    assert "latest and all are both given" in _refused(text)


def test_null_beside_a_member_of_a_oneof_is_absent() -> None:
    message = _read({"version_policy": {"all": None, "latest": {"num_versions": 2}}})

    assert 2 == message.version_policy.latest.num_versions


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "a", "name": "a"}',
        '{"max_batch_size": 1, "maxBatchSize": 1}',
        '{"input": [], "inputs": []}',
        '{"name": null, "name": null}',
        '{"input": [{"dims": [1], "shape": [1]}]}',
    ],
)
def test_field_given_twice_is_refused(text: str) -> None:
    assert "is given twice" in _refused(text)


def test_map_key_given_twice_is_refused() -> None:
    text = '{"metric_tags": {"a": "1", "\\u0061": "2"}}'

    assert 'metric_tags["a"]: key "a" of metric_tags is given twice' == _refused(text)


def test_integer_keys_of_a_map_are_strings() -> None:
    queue = {"timeout_action": "DELAY"}
    message = _read({"dynamic_batching": {"priority_queue_policy": {"7": queue}}})

    assert 1 == message.dynamic_batching.priority_queue_policy[7].timeout_action


def test_unknown_key_names_its_path_and_the_nearest() -> None:
    text = '{"parameters": {"a": {"stringValu": "b"}}}'
    expected = 'parameters["a"]: unknown field "stringValu", did you mean string_value?'

    assert expected == _refused(text)


def test_fault_names_the_path_of_keys() -> None:
    text = '{"input": [{"name": "a"}, {"name": "b", "dims": [1, "x"]}]}'

    assert 'input[1].dims[1]: expected an int64, got "x"' == _refused(text)


@pytest.mark.parametrize(
    ("datatype", "expected"),
    [
        ("FP32", "TYPE_FP32"),
        ("TYPE_FP32", "TYPE_FP32"),
        ("BF16", "TYPE_BF16"),
        ("BYTES", "TYPE_STRING"),
        ("STRING", "TYPE_STRING"),
    ],
)
def test_tensors_in_the_words_of_the_metadata_are_read(datatype: str, expected: str) -> None:
    """The repository extension's example of a load spells tensors like ModelMetadata does."""
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1]}

    message = _read({"name": "mymodel", "inputs": [tensor], "outputs": [tensor]})

    assert _read(
        {
            "name": "mymodel",
            "input": [{"name": "INPUT0", "data_type": expected, "dims": [1]}],
            "output": [{"name": "INPUT0", "data_type": expected, "dims": [1]}],
        }
    ) == (message)


def test_words_of_the_metadata_are_unknown_elsewhere() -> None:
    text = '{"ensemble_scheduling": {"step": [{"inputs": {}}]}}'

    assert 'unknown field "inputs"' in _refused(text)


@pytest.mark.parametrize(
    "text", ["", "[]", "1", "null", '"x"', "{", '{"name": }', "{} {}", "{'a':1}"]
)
def test_text_that_is_not_an_object_is_refused(text: str) -> None:
    _refused(text)


def test_fault_of_the_text_names_line_and_column() -> None:
    assert "line 2, column 10: Expecting value" == _refused('{\n "name": }')


@pytest.mark.parametrize("value", ["\ud800", "a\udc00b"])
def test_half_of_a_surrogate_pair_is_refused(value: str) -> None:
    assert "half of a surrogate pair" in _refused(json.dumps({"name": value}))


def test_nesting_is_bounded() -> None:
    assert f"nested deeper than {DEPTH} levels" == _refused("[" * (DEPTH + 1))
    assert "nested deeper" not in _refused("[" * DEPTH + "]" * DEPTH)


def test_brackets_inside_strings_do_not_count() -> None:
    name = '\\"' + "[" * 1000

    assert name == _read({"name": name}).name


@pytest.mark.parametrize(
    "text", ['{"input": [' + "{}," * MESSAGES * 2 + "{}]}", "[]" * MESSAGES * 3]
)
def test_number_of_objects_and_lists_is_bounded(text: str) -> None:
    assert f"more than {2 * MESSAGES} objects and lists" == _refused(text)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_no_value_is_taken_for_a_message(value: object) -> None:
    """Whatever stands where a message should is a BadConfig, never another exception."""
    _refused(json.dumps({"version_policy": [value]}))
