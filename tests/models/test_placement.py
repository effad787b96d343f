import json

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.message import config_of
from xlaserve.runtime.devices import placement
from xlaserve.runtime.devices.placement import Devices, Group, Placement
from xlaserve_proto import inference

KIND = inference.ModelInstanceGroupKind
RULES = json.dumps({"w*": [None, "model"]})


def _parameters(**parameters: str) -> ModelConfig:
    return ModelConfig(parameters=parameters)


def _groups(*groups: inference.ModelInstanceGroup) -> ModelConfig:
    return config_of(inference.ModelConfig(instance_group=list(groups)))


def _group(kind: int = KIND.KIND_AUTO, count: int = 0, *gpus: int) -> inference.ModelInstanceGroup:
    return inference.ModelInstanceGroup(kind=KIND(kind), count=count, gpus=list(gpus))


def test_without_a_word_a_model_goes_to_the_first_device() -> None:
    assert Placement("cuda", (Group((0,), 1),)) == placement.read(ModelConfig(), "cuda")


@pytest.mark.parametrize(
    ("group", "server", "expected"),
    [
        (_group(KIND.KIND_CPU, 3), "cpu", ("cpu", Group((0,), 3))),
        (_group(KIND.KIND_CPU, 3), "cuda", ("cpu", Group((0,), 3))),
        (_group(KIND.KIND_GPU, 2, 0, 3), "cuda", ("cuda", Group((0, 3), 2))),
        (_group(KIND.KIND_GPU), "cuda", ("cuda", Group(None, 1))),
        (_group(KIND.KIND_AUTO, 2), "cuda", ("cuda", Group(None, 2))),
        (_group(KIND.KIND_AUTO, 2, 1), "cpu", ("cpu", Group((0,), 2))),
    ],
)
def test_instance_group_says_where_and_how_many(
    group: inference.ModelInstanceGroup, server: str, expected: tuple[str, Group]
) -> None:
    """ModelInstanceGroup: GPU groups without a list use all GPUs; AUTO uses whatever exists."""
    found = placement.read(_groups(group), server)

    assert expected == (found.platform, *found.groups)


@pytest.mark.parametrize(
    ("config", "server", "text"),
    [
        (_groups(_group(KIND.KIND_GPU)), "cpu", "KIND_GPU, but this server runs on cpu"),
        (_groups(_group(KIND.KIND_MODEL, 1, 0)), "cuda", "expected none for KIND_MODEL, got [0]"),
        (_groups(_group(KIND.KIND_CPU, 1, 0)), "cuda", "expected none for KIND_CPU, got [0]"),
        (_groups(_group(KIND.KIND_GPU, 1, 2, 2)), "cuda", "expected each GPU once, got [2, 2]"),
        (_groups(_group(KIND.KIND_AUTO, -1)), "cpu", "expected 1 or more, got -1"),
        (_groups(_group(KIND.KIND_AUTO, 257)), "cpu", "expected 256 copies at most, got 257"),
        (
            _groups(_group(KIND.KIND_CPU), _group(KIND.KIND_GPU)),
            "cuda",
            "expected all groups on GPUs, or all on the CPU",
        ),
        (_parameters(devices="first"), "cpu", "'devices': expected \"all\" or indexes like"),
        (_parameters(devices="1,1"), "cpu", "'devices': expected each device once, got '1,1'"),
        (_parameters(placement="split"), "cpu", "expected replica or shard, got 'split'"),
        (_parameters(partition=RULES), "cpu", "'partition': expected placement \"shard\""),
        (_parameters(placement="shard"), "cpu", "'partition': expected rules like"),
        (_parameters(placement="shard", partition="{}"), "cpu", "expected rules like"),
        (_parameters(placement="shard", partition='{"w":[1]}'), "cpu", "expected rules like"),
        (_parameters(placement="shard", partition=RULES, mesh="4"), "cpu", "'mesh': expected axes"),
        (_parameters(placement="shard", partition=RULES, mesh="a=0"), "cpu", "got 'a=0'"),
        (_parameters(placement="shard", partition=RULES, mesh="a=2,a=2"), "cpu", "got 'a=2,a=2'"),
    ],
)
def test_contradiction_is_refused_by_name(config: ModelConfig, server: str, text: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        placement.read(config, server)
    assert text in str(caught.value)


def test_devices_are_listed_in_one_place() -> None:
    config = config_of(
        inference.ModelConfig(
            instance_group=[_group(KIND.KIND_GPU, 2, 0)],
            parameters={"devices": inference.ModelParameter(string_value="0,1")},
        )
    )

    with pytest.raises(InvalidModel, match="'devices': expected devices in only one of the two"):
        placement.read(config, "cuda")


def test_devices_take_the_count_of_the_group() -> None:
    config = config_of(
        inference.ModelConfig(
            instance_group=[_group(KIND.KIND_CPU, 2)],
            parameters={"devices": inference.ModelParameter(string_value="0,1")},
        )
    )

    assert (Group((0, 1), 2),) == placement.read(config, "cpu").groups


def test_partition_rules_keep_their_order() -> None:
    rules = {"a/*": ["model"], "*": [None, ["data", "model"]]}
    config = _parameters(
        placement="shard", devices="all", partition=json.dumps(rules), mesh="data=2, model=4"
    )

    found = placement.read(config, "cpu").sharding

    assert found is not None
    assert [("a/*", ("model",)), ("*", (None, ("data", "model")))] == list(found.partition.items())
    assert [("data", 2), ("model", 4)] == list(found.mesh.items())
    assert found.mesh == placement.mesh_of(found, 8)
    with pytest.raises(InvalidModel, match="'mesh': expected axes for 4 devices"):
        placement.mesh_of(found, 4)


def _files(*groups: inference.ModelInstanceGroup) -> ModelConfig:
    return config_of(
        inference.ModelConfig(
            default_model_filename="model.onnx",
            cc_model_filenames={"8.0": "old.onnx", "9.0": "new.onnx", "7.5": ""},
            instance_group=list(groups),
        )
    )


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (("9.0", "8.0"), "new.onnx"),
        (("8.0", "9.0"), "old.onnx"),
        (("7.5",), "model.onnx"),
        (("10.0",), "model.onnx"),
        ((), "model.onnx"),
    ],
)
def test_a_file_is_chosen_by_the_capability_of_the_devices(
    capabilities: tuple[str, ...], expected: str
) -> None:
    devices = Devices("cuda", max(1, len(capabilities)), capabilities=capabilities)

    found = placement.with_file_of(_files(), devices)

    assert expected == found.default_model_filename
    assert () == placement.without_effect(found, "cuda")


def test_a_model_on_the_cpu_has_no_capability() -> None:
    config = _files(_group(KIND.KIND_CPU, 1))

    found = placement.with_file_of(config, Devices("cuda", 1, capabilities=("9.0",)))

    assert "model.onnx" == found.default_model_filename
    assert ("cc_model_filenames",) == placement.without_effect(config, "cuda")
    assert ("cc_model_filenames",) == placement.without_effect(_files(), "cpu")


def test_splitting_is_for_the_cpu() -> None:
    config = ModelConfig(parameters={"split_batches": "false"})

    assert () == placement.without_effect(config, "cpu")
    assert ("parameters[split_batches]",) == placement.without_effect(config, "cuda")


def test_devices_that_want_different_files_are_refused() -> None:
    config = _files(_group(KIND.KIND_GPU, 1))
    devices = Devices("cuda", 2, capabilities=("9.0", "8.0"))

    with pytest.raises(InvalidModel, match=r"'new.onnx' for device 0, 'old.onnx' for device 1"):
        placement.with_file_of(config, devices)
