from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from support.protobuf import Google

from xlaserve.model_config.schema import BadConfig, Field, Schema, find_field, schema_of, shown
from xlaserve_proto import inference

CONFIG = schema_of(inference.ModelConfig)


def _google() -> Any:
    return Google()(inference.ModelConfig).DESCRIPTOR


def _both(schema: Schema, descriptor: Any, depth: int = 1) -> Iterator[tuple[Schema, Any, int]]:
    yield schema, descriptor, depth
    for field in schema.by_name.values():
        if field.message:
            inner = descriptor.fields_by_name[field.name].message_type
            yield from _both(schema_of(field.message), inner, depth + 1)


def _facts(field: Field) -> tuple[object, ...]:
    repeated = field.repeated or field.kind == "map"
    kind = "message" if field.message else field.kind
    return field.name, field.json_name, kind, repeated, field.oneof


def _google_facts(field: Any) -> tuple[object, ...]:
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    oneof = field.containing_oneof.name if field.containing_oneof else None
    return field.name, field.json_name, kind, field.is_repeated, oneof


def test_schema_is_that_of_the_contract() -> None:
    """Names, kinds, lists and oneofs of every message equal those of the compiled contract."""
    for schema, descriptor, _ in _both(CONFIG, _google()):
        ours = {_facts(field) for field in schema.by_name.values()}
        assert {_google_facts(field) for field in descriptor.fields} == ours


def test_enums_have_the_members_of_the_contract() -> None:
    for schema, descriptor, _ in _both(CONFIG, _google()):
        for field in schema.by_name.values():
            if field.members is not None:
                values = descriptor.fields_by_name[field.name].enum_type.values_by_name
                expected = {name: value.number for name, value in values.items()}
                assert expected == {name: int(value) for name, value in field.members.items()}


def test_schema_bounds_the_depth_of_a_configuration() -> None:
    """The reader of the text format leans on this: it has no bound of its own."""
    assert max(depth for _, _, depth in _both(CONFIG, _google())) < 10


def test_name_that_is_a_keyword_of_python_is_the_contracts_name() -> None:
    fields = schema_of(inference.ModelRateLimiterResource).by_name

    assert "global_" == fields["global"].attribute


def test_unknown_field_names_the_nearest() -> None:
    with pytest.raises(BadConfig, match=r'unknown field "max_batchsize", did you mean max_batch'):
        find_field(CONFIG.by_name, "max_batchsize")


def test_unknown_field_like_no_other_names_all() -> None:
    fields = schema_of(inference.ModelEnsemblingStep).by_name

    with pytest.raises(BadConfig, match="expected input_map, model_name, model_namespace, model"):
        find_field(fields, "?")


def test_fault_tells_its_place_from_the_outside_in() -> None:
    problem = BadConfig.mismatch("1", "2").within("[3]").within(".dims")

    assert "dims[3]: expected 1, got 2" == str(problem)


def test_shown_text_is_short_ascii_on_one_line() -> None:
    text = shown("\x1b[31m\n\u2028" + "x" * 1000)

    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 100
