"""Every field of a model configuration is obeyed, refused, or named as without effect."""

import re
from collections.abc import Iterator
from pathlib import Path

import betterproto
import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config import buckets, compiled_shapes
from xlaserve.model_config import fields as config_fields
from xlaserve.model_config.fields import FIELDS, PARAMETERS, SHOWN_FIELDS, Effect
from xlaserve.model_config.schema import Field, schema_of
from xlaserve.model_config.text import parse_json, parse_pbtxt
from xlaserve.runtime.generator import configured
from xlaserve_proto import inference

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = Path(config_fields.__file__).parent.parent
X = 'name: "x" data_type: TYPE_FP32 dims: [ 4 ]'
AGENT = 'agents { name: "decrypt" parameters { key: "a" value: "0" } }'
QUEUE = "dynamic_batching { default_queue_policy"
LEVELS = "priority_levels: 2 default_priority_level: 1"


def inner(field: Field) -> type[betterproto.Message] | None:
    """Return the messages that a field, or the values of a map, consist of."""
    if field.kind == "map" and field.message:
        return schema_of(field.message).by_name["value"].message
    return field.message


def fields(message: type[betterproto.Message], path: str = "") -> Iterator[tuple[str, Field]]:
    """Yield every field that no row above it stands for."""
    for field in schema_of(message).by_name.values():
        name = f"{path}{field.name}"
        yield name, field
        within = inner(field)
        if within is not None and (name not in FIELDS or FIELDS[name].effect is Effect.OBEYED):
            yield from fields(within, f"{name}.")


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    found = dict(fields(inference.ModelConfig))

    assert set(FIELDS) == set(found)


def test_rows_say_why_they_refuse() -> None:
    """Only a refusal has a reason, and only what is not obeyed can ask for nothing."""
    refused = {name for name, row in FIELDS.items() if row.effect is Effect.REFUSED}

    assert refused == {name for name, row in FIELDS.items() if row.because}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"model_repository_agents {{ {AGENT} }}", "model_repository_agents.agents[0].name"),
        (f"input {{ {X} is_shape_tensor: true }}", "input[0].is_shape_tensor"),
        (f"output {{ {X} is_shape_tensor: true }}", "output[0].is_shape_tensor"),
        (f"input {{ {X} is_non_linear_format_io: true }}", "input[0].is_non_linear_format_io"),
        (f"output {{ {X} is_non_linear_format_io: true }}", "output[0].is_non_linear_format_io"),
        ("instance_group { passive: true }", "instance_group[0].passive"),
        (
            'model_operations { op_library_filename: "a.so" }',
            "model_operations.op_library_filename",
        ),
    ],
)
def test_a_field_that_would_change_answers_is_refused(text: str, place: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        parse_pbtxt(text)

    assert str(caught.value).startswith(f"config: {place}: is not implemented, ")


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("model_transaction_policy { decoupled: true }", "several answers to a request"),
        (
            "sequence_batching { direct {} }",
            "its answers depend on earlier requests (sequence_batching)",
        ),
    ],
)
def test_a_cache_is_refused_where_an_answer_is_not_that_of_one_request(
    text: str, because: str
) -> None:
    with pytest.raises(InvalidModel, match=f"response_cache.enable: .*{re.escape(because)}"):
        parse_pbtxt(f"{text} response_cache {{ enable: true }}")


def test_every_refusal_has_a_case() -> None:
    """The cases above are written by hand, the table is not their source."""
    mark = test_a_field_that_would_change_answers_is_refused.pytestmark[0]  # type: ignore[attr-defined]
    cases = {
        place.replace("[0]", "").replace("[1]", "").replace('["x"]', "")
        for _, place in mark.args[1]
    }
    step = "ensemble_scheduling.step.model_namespace"  # below, in an ensemble that is whole

    assert cases | {step} == {n for n, row in FIELDS.items() if row.effect is Effect.REFUSED}


def test_a_step_in_another_namespace_is_refused() -> None:
    maps = '"input_map": {"a": "x"}, "output_map": {"b": "y"}, "model_namespace": "other"'
    tensor = '"data_type": "TYPE_FP32", "dims": [1]'
    text = (
        f'{{"input": [{{"name": "x", {tensor}}}], "output": [{{"name": "y", {tensor}}}],'
        f'"ensemble_scheduling": {{"step": [{{"model_name": "m", {maps}}}]}}}}'
    )
    with pytest.raises(InvalidModel, match=r"step\[0\]\.model_namespace: is not implemented"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"model_transaction_policy": {"decoupled": false}}',
        '{"model_repository_agents": {}}',
        '{"model_repository_agents": {"agents": []}}',
        '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4], "optional": false,'
        ' "allow_ragged_batch": false, "reshape": {"shape": [4]}}]}',
        '{"response_cache": {"enable": false}, "default_model_filename": ""}',
        '{"default_model_filename": "model.stablehlo", "batch_input": [], "model_warmup": []}',
        '{"dynamic_batching": {"default_queue_policy": {"timeout_action": "REJECT"}}}',
        '{"instance_group": [{"passive": false, "count": 1}], "runtime": null}',
    ],
)
def test_a_default_that_is_written_out_asks_for_nothing(text: str) -> None:
    assert () == parse_json(text).without_effect


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('metric_tags { key: "a" value: "b" }', ("metric_tags",)),
        ("optimization { graph { level: 1 } }", ("optimization",)),
        ("response_cache { enable: true }", ()),
        (
            'platform: "ensemble" response_cache { enable: true }'
            f"input {{ {X} }} output {{ {X.replace('x', 'y')} }} ensemble_scheduling {{ step {{"
            "model_name: 'm' input_map { key: 'a' value: 'x' }"
            "output_map { key: 'b' value: 'y' } } }",
            ("response_cache.enable",),
        ),
        (
            "sequence_batching { direct {} } model_warmup { inputs { key: 'x' value {"
            " zero_data: true dims: 1 data_type: TYPE_FP32 } } }",
            ("model_warmup",),
        ),
        (f'output {{ {X} label_filename: "l.txt" }}', ()),
        ('parameters { key: "mine" value { string_value: "1" } }', ('parameters["mine"]',)),
        ('parameters { key: "batch_rows" value {} }', ()),
        ('parameters { key: "devices" value { string_value: "0" } }', ()),
        (
            "instance_group { rate_limiter { priority: 2 } } instance_group { profile: 'a' }"
            "instance_group { rate_limiter { priority: 1 } }",
            ("instance_group.rate_limiter", "instance_group.profile"),
        ),
        (
            "dynamic_batching { priority_levels: 3 default_priority_level: 2 "
            "priority_queue_policy { key: 3 value { timeout_action: DELAY } } }",
            (),
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 1 "
            "default_priority_level: 1 }",
            (),
        ),
        (f'backend: "identity" {QUEUE} {{ max_queue_size: 1 }} }}', ()),
        (
            'model_warmup { name: "w" inputs { key: "x" value { zero_data: true dims: 1'
            " data_type: TYPE_FP32 } } }",
            (),
        ),
        ('backend: "identity" dynamic_batching {}', ("dynamic_batching",)),
        ("max_batch_size: 0 dynamic_batching {}", ("dynamic_batching",)),
        ("dynamic_batching {}", ()),
        ('platform: "onnxruntime_onnx"', ("platform (onnxruntime_onnx)",)),
        ('backend: "onnxruntime"', ("backend (onnxruntime)",)),
        ('name: "m" max_batch_size: 4 version_policy { all {} }', ()),
    ],
)
def test_what_changes_no_answer_is_named(text: str, named: tuple[str, ...]) -> None:
    assert named == parse_pbtxt(text).without_effect


def test_names_without_effect_are_bounded() -> None:
    entries = ", ".join(f'"p{index}": {{}}' for index in range(1000))
    found = parse_json(f'{{"parameters": {{{entries}}}}}').without_effect

    assert (SHOWN_FIELDS + 1, f"and {1000 - SHOWN_FIELDS} more") == (len(found), found[-1])


@pytest.mark.parametrize(("levels", "default"), [(3, 5), (3, 0), (0, 5)])
def test_a_priority_beyond_its_levels_is_refused(levels: int, default: int) -> None:
    text = f"dynamic_batching {{ priority_levels: {levels} default_priority_level: {default} }}"
    with pytest.raises(InvalidModel, match=f"default_priority_level: expected .*, got {default}"):
        parse_pbtxt(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("priority_queue_policy { key: 1 value {} }", "no level without priority_levels, got 1"),
        (
            f"{LEVELS} priority_queue_policy {{ key: 3 value {{}} }}",
            "expected a level of 1 to 2, got 3",
        ),
        (
            f"{LEVELS} priority_queue_policy {{ key: 0 value {{}} }}",
            "expected a level of 1 to 2, got 0",
        ),
        (
            f"{LEVELS} preserve_ordering: true",
            "priority_levels: expected at most 1 level with preserve_ordering, got 2",
        ),
        (
            "priority_levels: 4000000000 default_priority_level: 1",
            "priority_levels: expected at most 1000, got 4000000000",
        ),
    ],
)
def test_levels_that_cannot_be_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidModel, match=problem):
        parse_pbtxt(f"dynamic_batching {{ {text} }}")


def test_parameters_that_are_obeyed_are_in_the_documentation() -> None:
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    obeyed = PARAMETERS - {"batch_rows"}

    assert [] == [name for name in obeyed if f"`{name}`" not in pages]


def test_parameters_that_are_read_are_in_the_table() -> None:
    sources = "".join(file.read_text() for file in SOURCES.rglob("*.py"))
    read = set(re.findall(r'config\.parameters(?:\.get\(|\[)"(\w+)"', sources))
    read |= {buckets.BATCH_SIZES, buckets.BATCH_INDEPENDENT}
    read |= {compiled_shapes.COMPILED_SHAPES, compiled_shapes.MAX_ON_DEMAND_SHAPES}
    read |= {configured.PREFIX_CACHE, configured.STEP_SIZES}

    assert {"devices", "placement", "mesh", "partition"} < read
    assert read <= set(PARAMETERS)
