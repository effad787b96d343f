"""The readers of configurations against those of Google, which are taken to be right."""

import random
import warnings
from typing import Any

import betterproto
import pytest
from google.protobuf import json_format, text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.protobuf import Google

from xlaserve.model_config.json_form import read_json
from xlaserve.model_config.pbtxt import read_pbtxt
from xlaserve.model_config.schema import BadConfig, schema_of
from xlaserve_proto import inference

CONFIG = schema_of(inference.ModelConfig)
GOOGLE: Any = Google()(inference.ModelConfig)


# --- both kinds of messages as plain values, to compare them --------------------------------


def _plain(value: Any) -> Any:
    """Only what is set, so that presence is compared as well; -0.0 and NaN are themselves."""
    match value:
        case float():
            plain: Any = repr(value)
        case bool() | str():
            plain = value
        case int():
            plain = int(value)
        case betterproto.Message():
            plain = _plain_ours(value)
        case _ if hasattr(value, "ListFields"):
            plain = {field.name: _plain(inner) for field, inner in value.ListFields()}
        case _ if hasattr(value, "items"):
            plain = {key: _plain(inner) for key, inner in value.items()}
        case _:
            plain = [_plain(inner) for inner in value]
    return plain


def _plain_ours(message: betterproto.Message) -> dict[str, Any]:
    plain = {}
    for field in schema_of(type(message)).by_name.values():
        if field.oneof:
            chosen, value = betterproto.which_one_of(message, field.oneof)
            present = chosen == field.attribute
        else:
            value = getattr(message, field.attribute)
            single = isinstance(value, betterproto.Message)
            present = betterproto.serialized_on_wire(value) if single else _set(value)
        if present:
            plain[field.name] = _plain(value)
    return plain


def _set(value: Any) -> bool:
    return repr(value) == "-0.0" or bool(value)


# --- configurations, whatever they may mean ---------------------------------------------------

_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "TYPE_STRING": st.text(max_size=8),
    "TYPE_BOOL": st.booleans(),
    "TYPE_INT32": st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2),
    "TYPE_INT64": st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
    "TYPE_UINT32": st.integers(0, 2**32 - 1),
    "TYPE_UINT64": st.integers(0, 2**64 - 1),
    "TYPE_FLOAT": st.floats(width=32),
    "TYPE_DOUBLE": st.floats(),
}


@st.composite
def _configs(draw: st.DrawFn) -> Any:
    config = GOOGLE()
    _fill_all(draw, config)
    return config


def _fill_all(draw: st.DrawFn, message: Any) -> None:
    known = message.DESCRIPTOR.fields_by_name
    for name in draw(st.lists(st.sampled_from(sorted(known)), max_size=5)) if known else ():
        _fill(draw, message, known[name])


def _fill(draw: st.DrawFn, message: Any, field: Any) -> None:
    value = getattr(message, field.name)
    if field.message_type and field.message_type.GetOptions().map_entry:
        for _ in range(draw(st.integers(0, 3))):
            _put(draw, value, **field.message_type.fields_by_name)
    elif field.message_type and field.is_repeated:
        for _ in range(draw(st.integers(0, 3))):
            _fill_all(draw, value.add())
    elif field.message_type:
        value.SetInParent()
        _fill_all(draw, value)
    elif field.is_repeated:
        value.extend(draw(st.lists(_scalars(field), max_size=4)))
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _put(draw: st.DrawFn, entries: Any, key: Any, value: Any) -> None:
    name = draw(_scalars(key))
    if value.message_type:
        _fill_all(draw, entries[name])
    else:
        entries[name] = draw(_scalars(value))


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    if field.enum_type:
        return st.sampled_from(sorted(field.enum_type.values_by_number))
    return _SCALARS[FieldDescriptorProto.Type.Name(field.type)]


CONFIGS = _configs()


# --- what Google writes, we read --------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.booleans(), st.booleans(), st.sampled_from([None, 2]))
def test_json_that_google_writes_is_read_alike(
    config: Any, snake_case: bool, numbers: bool, indent: int | None
) -> None:
    text = json_format.MessageToJson(
        config,
        preserving_proto_field_name=snake_case,
        use_integers_for_enums=numbers,
        indent=indent,
    )

    assert _plain(config) == _plain(read_json(text, CONFIG))


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_pbtxt_that_google_writes_is_read_alike(config: Any, choices: list[bool]) -> None:
    text = text_format.MessageToString(
        config,
        as_utf8=choices[0],
        as_one_line=choices[1],
        use_short_repeated_primitives=choices[2],
        pointy_brackets=choices[3],
        use_index_order=choices[4],
        force_colon=choices[5],
    )

    assert _plain(config) == _plain(read_pbtxt(text, CONFIG))


# --- what somebody else writes: refused, or read as Google reads it ---------------------------

_PBTXT_PIECES = (
    *(
        "name",
        "input",
        "dims",
        "parameters",
        "key",
        "value",
        "TYPE_FP32",
        "true",
        "t",
        "inf",
        "nan",
    ),
    *(":", ",", ";", "{", "}", "<", ">", "[", "]", "#", "\n", " ", "\\", "\\101", '"', "'"),
    *("-", "+", ".", "0", "1", "07", "0x1F", "1e3", "1.5f", "e", '"a"', "'b'"),
)
_JSON_PIECES = (
    *('"name"', '"input"', '"dims"', '"maxBatchSize"', '"TYPE_FP32"', "null", "true", "NaN"),
    *(
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "[]",
        "{}",
        '"',
        "\n",
        " ",
        "\\",
        "\\u0041",
        '"NaN"',
        '"Infinity"',
    ),
    *("-", "+", ".", "0", "1", "e", "1e1", "1.5", '"16"'),
)


def _mutated(text: str, seed: int, pieces: tuple[str, ...]) -> str:
    """Cut out, double or put in a few pieces."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 3)):
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.choice((0, 0, 1, 1, 2, 8)))
        put = chance.choice(("", text[start:end] * 2, chance.choice(pieces)))
        text = text[:start] + put + text[end:]
    return text


def _outcome(read: Any, text: str) -> Any:
    """What comes of a text; None where it is refused."""
    try:
        with warnings.catch_warnings():
            # Python's codecs, with which Google unescapes strings, warn of unknown escapes.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _plain(read(text))
    except (BadConfig, json_format.ParseError, text_format.ParseError):
        return None


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(CONFIGS, st.integers(), st.booleans())
def test_mutated_pbtxt_is_refused_or_read_alike(config: Any, seed: int, one_line: bool) -> None:
    written = text_format.MessageToString(config, as_one_line=one_line)
    text = _mutated(written, seed, _PBTXT_PIECES)
    assume("\\?" not in text)  # Google's reader in Python leaves the backslash there

    ours = _outcome(lambda text: read_pbtxt(text, CONFIG), text)

    assert ours in (None, _outcome(lambda text: text_format.Parse(text, GOOGLE()), text))


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(CONFIGS, st.integers(), st.booleans())
def test_mutated_json_is_refused_or_read_alike(config: Any, seed: int, snake_case: bool) -> None:
    written = json_format.MessageToJson(config, preserving_proto_field_name=snake_case)
    assume("3.4028235e+38" not in written)  # Google's reader in Python takes it for too large
    text = _mutated(written, seed, _JSON_PIECES)

    ours = _outcome(lambda text: read_json(text, CONFIG), text)

    assert ours in (None, _outcome(lambda text: json_format.Parse(text, GOOGLE()), text))


# --- texts written by hand --------------------------------------------------------------------

PBTXT = r"""
# A configuration as people write them.
name: "densenet"  platform: 'jax' "_export";
max_batch_size: 0x8,
input [
  { name: "data\0" data_type: TYPE_FP32, dims: [ 3, 0340, -1 ] reshape { shape: [] } },
  < name: "mask" data_type: 1 dims: 1 dims: 2 optional: t >
]
output { name: "\303\244\u00e4\U0001F600\"\'\x41\n" data_type: TYPE_BF16 label_filename: "" }
version_policy: { specific { versions: [1, 3,5] } }
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1 ] rate_limiter { resources [
  { name: "r" global: True count: 2 } ] } } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
  priority_queue_policy { key: 1 value: { timeout_action: DELAY max_queue_size: 10 } } }
optimization { cuda { graphs: true graph_spec { batch_size: 1
  input { key: "x" value { dim: [16] } } } } }
parameters { key: "a" value { string_value: "b" } }
parameters: { value < > key: "c" }
parameters [ { key: "d" }, {} ]
model_metrics { metric_control { histogram_options {
  buckets: [ .5, 1., 2f, -3e-1F, inf, -inf ] } } }
"""

JSON = r"""
{"name": "densenet\u00e4\ud83d\ude00", "maxBatchSize": "8", "platform": null,
 "input": [{"name": "data", "dataType": "TYPE_FP32", "dims": ["3", 224, 1e2, -1.0]},
           {"name": "mask", "data_type": 1, "dims": [], "optional": true}],
 "versionPolicy": {"specific": {"versions": ["1", 3]}},
 "dynamicBatching": {"preferredBatchSize": [4, 8], "maxQueueDelayMicroseconds": "1e2",
   "priorityQueuePolicy": {"1": {"timeoutAction": "DELAY"}, "18446744073709551615": {}}},
 "sequence_batching": null, "optimization": {}, "cc_model_filenames": {"": "", "a": "b"},
 "modelMetrics": {"metricControl": [{"histogramOptions": {
   "buckets": [0.5, "1.5", "NaN", "-Infinity", 1, "1e2", -0.0]}}]}}
"""


def test_pbtxt_written_by_hand_is_read_alike() -> None:
    assert _plain(text_format.Parse(PBTXT, GOOGLE())) == _plain(read_pbtxt(PBTXT, CONFIG))


def test_json_written_by_hand_is_read_alike() -> None:
    assert _plain(json_format.Parse(JSON, GOOGLE())) == _plain(read_json(JSON, CONFIG))


@pytest.mark.parametrize("text", ["", " ", "# only a comment", "\n\t\r"])
def test_pbtxt_without_fields_is_the_empty_message(text: str) -> None:
    assert {} == _plain(read_pbtxt(text, CONFIG)) == _plain(text_format.Parse(text, GOOGLE()))
