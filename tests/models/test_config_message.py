import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, EnsembleStep, VersionPolicy
from xlaserve.model_config.text import parse_json, parse_pbtxt
from xlaserve.tensors import DATATYPES
from xlaserve_proto import inference

INPUT = '{ name: "x" data_type: TYPE_FP32 dims: [ -1, 16 ] }'
ENDS = f'input {INPUT} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}'


def _refused(text: str) -> str:
    with pytest.raises(InvalidModel) as caught:
        parse_pbtxt(text)
    return str(caught.value)


def test_everything_the_server_acts_on_is_taken() -> None:
    config = parse_pbtxt(
        f"""
        name: "digits" platform: "jax_export" backend: "xla" max_batch_size: 8
        input {INPUT} output {{ name: "y" data_type: TYPE_STRING dims: [] }}
        parameters {{ key: "device" value {{ string_value: "cpu" }} }}
        """
    )

    assert ("digits", "jax_export", "xla", 8) == (
        config.name,
        config.platform,
        config.backend,
        config.max_batch_size,
    )
    assert (ConfigTensor("x", DATATYPES["FP32"], (-1, 16)),) == config.inputs
    assert (ConfigTensor("y", DATATYPES["BYTES"], ()),) == config.outputs
    assert {"device": "cpu"} == config.parameters


def test_whole_message_is_kept_but_not_compared() -> None:
    config = parse_json('{"metric_tags": {"a": "b"}}')

    assert isinstance(config.message, inference.ModelConfig)
    assert {"a": "b"} == config.message.metric_tags
    assert parse_json("{}") == config


def test_every_datatype_has_a_name_in_configurations() -> None:
    for datatype in DATATYPES.values():
        config = parse_pbtxt(f'input {{ name: "x" data_type: {datatype.config_name} dims: 1 }}')
        assert datatype is config.inputs[0].datatype


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", VersionPolicy(latest=1)),
        ("version_policy {}", VersionPolicy(latest=1)),
        ("version_policy { latest {} }", VersionPolicy(latest=1)),
        ("version_policy { latest { num_versions: 0 } }", VersionPolicy(latest=1)),
        ("version_policy { latest { num_versions: 3 } }", VersionPolicy(latest=3)),
        ("version_policy { all {} }", VersionPolicy(latest=None)),
        (
            "version_policy { specific { versions: [3, 1] } }",
            VersionPolicy(latest=None, specific=(3, 1)),
        ),
    ],
)
def test_version_policy_is_one_of_three(text: str, expected: VersionPolicy) -> None:
    assert expected == parse_pbtxt(text).version_policy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_batch_size: -1", "config: max_batch_size: expected 0 or more, got -1"),
        (
            f"input {INPUT} input {INPUT}",
            'input[1].name: expected a unique name, got "x" again',
        ),
        (f"output {INPUT} output {INPUT}", "output[1].name: expected a unique name"),
        ("input { data_type: TYPE_FP32 }", "input[0].name: expected a name, got none"),
        ('input { name: "x" }', "input[0].data_type: expected one of TYPE_BOOL"),
        ('input { name: "x" data_type: TYPE_INVALID }', "input[0].data_type: expected one of"),
        (
            'output { name: "x" data_type: TYPE_BOOL dims: [1, 0] }',
            "output[0].dims[1]: expected a size above 0, or -1 for any, got 0",
        ),
        ('input { name: "x" data_type: TYPE_BOOL dims: -2 }', "input[0].dims[0]: expected a size"),
        (
            "version_policy { specific {} }",
            "version_policy.specific.versions: expected at least one version, got none",
        ),
        (
            "version_policy { specific { versions: [1, 0] } }",
            "version_policy.specific.versions[1]: expected a version above 0, got 0",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(text: str, problem: str) -> None:
    assert problem in _refused(text)


def test_input_and_output_may_share_a_name() -> None:
    config = parse_pbtxt(f"input {INPUT} output {INPUT}")

    assert config.inputs == config.outputs


@pytest.mark.parametrize(
    ("version", "expected"), [("", ""), ("model_version: -1", ""), ("model_version: 7", "7")]
)
def test_step_of_an_ensemble_names_a_model_and_maps_tensors(version: str, expected: str) -> None:
    config = parse_pbtxt(
        f"""{ENDS} platform: "ensemble" ensemble_scheduling {{ step {{
            model_name: "m" {version}
            input_map {{ key: "in" value: "x" }} output_map {{ key: "out" value: "y" }} }} }}"""
    )

    assert (EnsembleStep("m", expected, {"in": "x"}, {"out": "y"}),) == config.steps
    assert config.is_ensemble


MAPS = 'input_map { key: "a" value: "x" } output_map { key: "b" value: "y" }'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{ENDS} platform: 'ensemble'", "ensemble_scheduling: expected the steps"),
        (f"{ENDS} ensemble_scheduling {{}}", "ensemble_scheduling.step: expected at least one"),
        (
            f"{ENDS} platform: 'jax' ensemble_scheduling {{ step {{}} }}",
            'ensemble_scheduling: expected platform "ensemble", no backend, got "jax"',
        ),
        (
            f"{ENDS} backend: 'xla' ensemble_scheduling {{ step {{}} }}",
            'ensemble_scheduling: expected platform "ensemble", no backend, got "xla"',
        ),
        ("ensemble_scheduling { step {} }", "config: input: expected at least one for an ensemble"),
        (f"{ENDS} ensemble_scheduling {{ step {{}} }}", "step[0].model_name: expected the name"),
        (
            f"{ENDS} ensemble_scheduling {{ step {{ model_name: 'm' model_version: -2 {MAPS} }} }}",
            "step[0].model_version: expected a version, or -1 for any, got -2",
        ),
        (
            f"{ENDS} ensemble_scheduling {{ step {{ model_name: 'm' }} }}",
            "ensemble_scheduling.step[0].input_map: expected at least one tensor, got none",
        ),
        (
            f"{ENDS} ensemble_scheduling {{ step {{ model_name: 'm' input_map {{ key: 'a' }} }} }}",
            "ensemble_scheduling.step[0].input_map: expected names, got an empty name",
        ),
        (
            f"{ENDS} ensemble_scheduling {{ step {{ model_name: 'm' {MAPS} "
            "output_map { key: 'c' value: 'x' } } }",
            'ensemble_scheduling: tensor "x" has two sources: an input and step 0 ("m")',
        ),
    ],
)
def test_ensemble_that_cannot_run_is_refused(text: str, problem: str) -> None:
    assert problem in _refused(text)


@pytest.mark.parametrize(
    ("written", "read"),
    [("max_batch_size: 0", True), ("max_batch_size: 4", False), ("", False)],
)
def test_zero_that_is_written_is_told_from_nothing(written: str, read: bool) -> None:
    """Proto3 does not tell them apart; unbatched and "whatever the artifact says" are not alike."""
    as_json = written and f'"{written.replace(":", chr(34) + ":")}'
    camel = as_json.replace("max_batch_size", "maxBatchSize")

    assert read == parse_pbtxt(written).is_unbatched
    assert [read, read] == [parse_json(f"{{{text}}}").is_unbatched for text in (as_json, camel)]
