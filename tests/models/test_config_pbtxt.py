import math
from typing import Any

import betterproto
import pytest

from xlaserve.model_config.pbtxt import read_pbtxt
from xlaserve.model_config.schema import MESSAGES, BadConfig, schema_of
from xlaserve_proto import inference

CONFIG = schema_of(inference.ModelConfig)


def _read(text: str) -> Any:
    return read_pbtxt(text, CONFIG)


def _refused(text: str) -> str:
    with pytest.raises(BadConfig) as caught:
        _read(text)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "a" } input { name: "b" }',
        'input: { name: "a" } input: { name: "b" }',
        'input < name: "a" > input: < name: "b" >',
        'input [ { name: "a" }, { name: "b" } ]',
        'input: [ < name: "a" >, { name: "b" } ]',
        'input { name: "a" }, input { name: "b"; };',
        "input{name:\"a\"}input{name:'b'}",
        '# one\ninput { # two\n name: "a" }#three\ninput {name # four\n:# five\n"b"} # six',
    ],
)
def test_message_may_be_spelled_in_many_ways(text: str) -> None:
    assert ["a", "b"] == [tensor.name for tensor in _read(text).input]


@pytest.mark.parametrize(
    "text", ["dims: -1 dims: 16", "dims: [-1, 16]", "dims: [ -1 ] dims: [ 16 ]", "dims:-1,dims:16"]
)
def test_repeated_scalar_may_be_a_list_or_given_again(text: str) -> None:
    assert [-1, 16] == _read(f"input {{ {text} }}").input[0].dims


@pytest.mark.parametrize("text", ["input []", "input: []", "input { dims: [] }"])
def test_list_may_be_empty(text: str) -> None:
    assert [] == [size for tensor in _read(text).input for size in tensor.dims]


@pytest.mark.parametrize("spelling", ["16", "0x10", "0X10", "020"])
def test_integer_is_decimal_hexadecimal_or_octal(spelling: str) -> None:
    assert 16 == _read(f"max_batch_size: {spelling}").max_batch_size


@pytest.mark.parametrize(
    "spelling",
    [
        "1.0",
        "1e1",
        '"16"',
        "+16",
        "- 16",
        "08",
        "0x",
        "0b1",
        "1_6",
        "16abc",
        "2147483648",
        "0x80000000",
        "9" * 5000,
        "TYPE_FP32",
        "{}",
        "[16]",
        "",
    ],
)
def test_other_integer_is_refused(spelling: str) -> None:
    assert "line 1, column 17: expected an int32, got " in _refused(f"max_batch_size: {spelling}")


def test_zeros_alone_are_zero() -> None:
    assert 0 == _read("max_batch_size: 000").max_batch_size


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("1", 1.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5f", -0.5),
        ("1f", 1.0),
        ("2.5E+1F", 25.0),
        ("inf", float("inf")),
        ("-Infinity", float("-inf")),
    ],
)
def test_float_may_be_spelled_in_many_ways(spelling: str, expected: float) -> None:
    text = f"sequence_batching {{ direct {{ minimum_slot_utilization: {spelling} }} }}"

    assert expected == _read(text).sequence_batching.direct.minimum_slot_utilization


@pytest.mark.parametrize("spelling", ["nan", "NaN", "-nan"])
def test_float_may_be_no_number(spelling: str) -> None:
    text = f"sequence_batching {{ direct {{ minimum_slot_utilization: {spelling} }} }}"
    value = _read(text).sequence_batching.direct.minimum_slot_utilization

    assert math.isnan(value)


@pytest.mark.parametrize(
    "spelling", ["0x10", "010", "1_0", "1e39", "1e999", '"1"', '"inf"', "e1", "."]
)
def test_other_float_is_refused(spelling: str) -> None:
    text = f"sequence_batching {{ direct {{ minimum_slot_utilization: {spelling} }} }}"

    assert "expected" in _refused(text)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        *((word, True) for word in ("true", "True", "t", "1")),
        *((word, False) for word in ("false", "False", "f", "0")),
    ],
)
def test_boolean_may_be_spelled_in_many_ways(spelling: str, expected: bool) -> None:
    text = f"response_cache {{ enable: {spelling} }}"

    assert expected is _read(text).response_cache.enable


@pytest.mark.parametrize("spelling", ["TRUE", "yes", "2", "01", '"true"'])
def test_other_boolean_is_refused(spelling: str) -> None:
    text = f"response_cache {{ enable: {spelling} }}"

    assert "expected true or false" in _refused(text)


@pytest.mark.parametrize("spelling", ["TYPE_FP32", "11", "0xb"])
def test_enum_is_a_name_or_a_number(spelling: str) -> None:
    message = _read(f"input {{ data_type: {spelling} }}")

    assert inference.DataType.TYPE_FP32 == message.input[0].data_type


@pytest.mark.parametrize("spelling", ["FP32", '"TYPE_FP32"', "15", "-1", "1.0"])
def test_unknown_enum_value_is_refused(spelling: str) -> None:
    text = f"input {{ data_type: {spelling} }}"

    assert "line 1, column 20: expected one of TYPE_INVALID, TYPE_BOOL" in _refused(text)


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        (r"'it\'s'", "it's"),
        (r'"\"\\\?"', '"\\?'),
        (r'"\a\b\f\n\r\t\v"', "\a\b\f\n\r\t\v"),
        (r'"\101\x42\103\x4x"', "ABC\x04x"),
        (r'"\0\01\0011"', "\0\x01\x011"),
        (r'"\303\251\xc3\xa9"', "\u00e9\u00e9"),
        (r'"\u00e9\U0001F600"', "\u00e9\U0001f600"),
        ('"\u00e9"', "\u00e9"),
        ('"a" \'b\'\n"c"', "abc"),
        (r'"\303" "\251"', "\u00e9"),
        ('""', ""),
    ],
)
def test_string_escapes_are_those_of_c(literal: str, expected: str) -> None:
    assert expected == _read(f"name: {literal}").name


@pytest.mark.parametrize(
    ("literal", "problem"),
    [
        (r'"\q"', r"unknown escape sequence"),
        (r'"\400"', "unknown escape sequence"),
        (r'"\x"', "unknown escape sequence"),
        (r'"\u12"', "unknown escape sequence"),
        (r'"\U00110000"', "unknown escape sequence"),
        (r'"\xff"', "expected a string in UTF-8"),
        (r'"\ud800"', "expected a string in UTF-8"),
        ('"\ud800"', "expected a string in UTF-8"),
        ('"a', "an unterminated string"),
        ('"a\n"', "an unterminated string"),
        ("\"a'", "an unterminated string"),
        ('"a\\"', "an unterminated string"),
        ("a", 'expected a string, got "a"'),
    ],
)
def test_other_string_is_refused(literal: str, problem: str) -> None:
    assert problem in _refused(f"name: {literal}")


@pytest.mark.parametrize(
    "text",
    [
        'parameters { key: "k" value { string_value: "v" } }',
        'parameters { value: { string_value: "v" } key: "k" }',
        'parameters [ { key: "k", value < string_value: "v" > } ]',
    ],
)
def test_map_is_a_list_of_entries(text: str) -> None:
    message = _read(text)

    assert {"k": "v"} == {key: value.string_value for key, value in message.parameters.items()}


def test_key_and_value_of_an_entry_have_defaults() -> None:
    assert {"": ""} == _read("metric_tags {}").metric_tags
    assert {7: inference.ModelQueuePolicy()} == (
        _read("dynamic_batching { priority_queue_policy { key: 7 } }")
    ).dynamic_batching.priority_queue_policy


def test_map_key_given_twice_is_refused() -> None:
    text = 'metric_tags { key: "a" }\n\nmetric_tags { key: "a" }'

    assert 'line 3, column 13: key "a" of metric_tags is given twice' == _refused(text)


def test_empty_message_is_present() -> None:
    message = _read("optimization {} version_policy { all {} }")

    assert betterproto.serialized_on_wire(message.optimization)
    assert "all" == betterproto.which_one_of(message.version_policy, "policy_choice")[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: 'a'\nname: 'a'", "line 2, column 1: name is given twice"),
        ("version_policy {}\nversion_policy {}", "line 2, column 1: version_policy is given"),
        (
            "dynamic_batching {}\nensemble_scheduling {}",
            "line 2, column 1: ensemble_scheduling and dynamic_batching are both given",
        ),
        ("max_batch_size: 0 max_batch_size: 0", "max_batch_size is given twice"),
        ("inputs {}", 'line 1, column 1: unknown field "inputs", did you mean input?'),
        ("input { names: 'a' }", 'line 1, column 9: unknown field "names", did you mean name?'),
        ("input {\n  dims 1 }", "line 2, column 8: expected ':' after dims, got \"1\""),
        ("input: 1", "line 1, column 8: expected '{', got \"1\""),
        ("input {", "line 1, column 8: expected a field or }, got the end"),
        ("input { >", 'expected a field or }, got ">"'),
        ("}", 'line 1, column 1: expected a field or the end, got "}"'),
        ("input [ {} {} ]", "expected ',', got \"{\""),
        ("input [ {}, ]", "expected '{', got \"]\""),
        ("input { dims: [1, ] }", 'expected an int64, got "]"'),
        ("input { dims: [1 2] }", "expected ',', got \"2\""),
        ("input { dims: [[1]] }", 'expected an int64, got "["'),
        ("input [ [ {} ] ]", "expected '{', got \"[\""),
        ("name: ['a']", 'expected a string, got "["'),
        ("name: 'a',, platform: 'b'", 'expected a field or the end, got ","'),
        ("name: 'a';, platform: 'b'", 'expected a field or the end, got ","'),
        ("[type.googleapis.com/a.B] {}", 'expected a field or the end, got "["'),
        ("1: 'a'", 'expected a field or the end, got "1"'),
        ("name: 'a' \x00", 'line 1, column 11: expected a token of the text format, got "\\u0000"'),
        ("\u00e9: 1", "line 1, column 1: expected a token of the text format"),
        ("name: 'a'\r\n\tname: 'b'", "line 2, column 2: name is given twice"),
    ],
)
def test_fault_names_line_and_column(text: str, problem: str) -> None:
    assert problem in _refused(text)


def test_number_of_messages_is_bounded() -> None:
    assert f"more than {MESSAGES} messages" in _refused("input{}" * (MESSAGES + 1))


def test_deep_nesting_is_refused_at_the_first_unknown_field() -> None:
    assert 'line 1, column 7: unknown field "input"' in _refused("input{" * 100_000)
