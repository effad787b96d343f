import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.virtual_devices import run_on_devices

from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.devices import device, placement, sites
from xlaserve.runtime.devices.placement import Group, Placement
from xlaserve.runtime.devices.sites import Layout

SCRIPT = Path(__file__).with_name("on_devices.py")
PARAMETERS = {"w1": (6, 512), "w2": (512, 8), "b": (512,)}


# --- two devices, in this process ----------------------------------------------------------------


def _devices(layout: Layout) -> list[tuple[int, ...]]:
    return [tuple(one.id for one in layout.sites[index].devices) for index in layout.replicas]


def test_all_meshes_have_one_lock_and_a_device_has_none() -> None:
    """Two threads that dispatch to several devices concurrently could deadlock."""
    first, second = jax.local_devices()[:2]
    meshes = [sites.Site(devices) for devices in ((first, second), (second, first))]

    assert meshes[0].launching is meshes[1].launching is not None
    assert sites.Site((first,)).launching is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((Group(),), [(0,)]),
        ((Group((1,)),), [(1,)]),
        ((Group(None),), [(0,), (1,)]),
        ((Group((1, 0), 2),), [(1,), (0,), (1,), (0,)]),
        ((Group((0,), 2), Group((1,))), [(0,), (0,), (1,)]),
    ],
)
def test_replica_goes_to_each_device(
    groups: tuple[Group, ...], expected: list[tuple[int, ...]]
) -> None:
    found = sites.layout(Placement("cpu", groups))

    assert expected == _devices(found)
    assert len(set(expected)) == len(found.sites), "replicas of one device share a site"


@pytest.mark.parametrize("index", [-1, 2])
def test_device_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(
        InvalidModel, match=f"device {index} does not exist: this server has 2 of cpu"
    ):
        sites.layout(Placement("cpu", (Group((index,)),)))


def _sharded(rules: dict[str, Any], **parameters: str) -> Layout:
    given = {"devices": "all", "placement": "shard", "partition": json.dumps(rules), **parameters}
    return sites.layout(placement.read(ModelConfig(parameters=given), "cpu"))


def test_shards_lie_on_every_device() -> None:
    (site,) = _sharded({"w1": [None, "model"]}).sites
    array = jax.device_put(np.zeros((6, 512), np.float32), site.parameter("w1"))

    assert ("cpu:0", "cpu:1") == site.device_names
    assert [(6, 256), (6, 256)] == [shard.data.shape for shard in array.addressable_shards]
    assert site.parameter("b").is_fully_replicated
    assert (True, False) == (site.is_split("w1"), site.is_split("b"))


def test_first_rule_that_fits_counts() -> None:
    (site,) = _sharded({"w1": ["model"], "w*": [None, "model"]}).sites

    assert (3, 512) == site.parameter("w1").shard_shape((6, 512))
    assert (512, 4) == site.parameter("w2").shard_shape((512, 8))


def test_batch_is_split_over_the_data_axis() -> None:
    """Batches that cannot be split evenly go to every device as a whole."""
    (site,) = _sharded({"w1": [None]}, mesh="data=2").sites

    assert (2, 8) == site.inputs(4).shard_shape((4, 8))
    assert (3, 8) == site.inputs(3).shard_shape((3, 8))


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"v*": ["model"]}, "partition rule 'v*' matches no parameter of: w1, w2, b"),
        ({"w1": ["data"]}, "partition rule 'w1': no axis 'data', the mesh has 'model'"),
        ({"w1": ["model", "model"]}, "partition rule 'w1' has axis 'model' twice"),
        ({"b": [None, "model"]}, "parameter 'b' has 1 dimensions, its partition rule has 2"),
    ],
)
def test_rule_that_fits_nothing_is_refused(rules: dict[str, Any], text: str) -> None:
    (site,) = _sharded(rules).sites

    with pytest.raises(InvalidModel) as caught:
        site.check(PARAMETERS)
    assert text in str(caught.value)


def test_parameter_that_cannot_be_split_is_named() -> None:
    (site,) = _sharded({"w1": ["model"]}).sites

    with pytest.raises(InvalidModel, match=r"'w1': dimension 0 of \[7, 4\] cannot be split into 2"):
        site.check({"w1": (7, 4)})


def test_mesh_is_for_all_of_the_devices() -> None:
    with pytest.raises(InvalidModel, match="'mesh': expected axes for 2 devices, got 'model=3'"):
        _sharded({"w1": ["model"]}, mesh="model=3")


def test_devices_are_booked_by_the_name_that_was_asked_for() -> None:
    """A CUDA device reports its platform as gpu."""
    assert ("cuda:1",) == sites.Site([jax.devices()[1]], platform="cuda").device_names


def test_memory_of_the_cpu_is_the_hosts() -> None:
    assert {} == device.memory("cpu")


def test_memory_of_a_device_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        id = 1

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": 3, "bytes_limit": 7}

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Fake()])

    assert {"cuda:1": (3, 7)} == device.memory("cuda")


# --- four and eight devices, each in a separate process ------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The results of all placements on a machine with this many devices."""

    count: int
    seen: dict[str, dict[str, Any]]

    @property
    def every(self) -> list[int]:
        return list(range(self.count))


@pytest.fixture(scope="session", params=[4, pytest.param(8, marks=pytest.mark.slow)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A multilayer perceptron exported for one device, loaded with all the script's placements."""
    directory = tmp_path_factory.mktemp("models") / "mlp"
    random = np.random.default_rng(4)
    w1 = random.standard_normal((6, 512), np.float32)
    w2 = random.standard_normal((512, 8), np.float32)
    x = random.standard_normal((4, 6), np.float32)
    export_model(
        lambda p, x: jax.nn.relu(x @ p["w1"]) @ p["w2"],
        {"w1": w1, "w2": w2},
        {"x": ("FP32", [-1, 6])},
        directory / "1",
        outputs=["y"],
        max_batch_size=4,
    )
    np.save(directory / "x.npy", x)
    np.save(directory / "expected.npy", np.maximum(x @ w1, 0) @ w2)
    printed = run_on_devices(SCRIPT, directory / "1", request.param)
    return Machine(request.param, json.loads(printed))


BUCKETS = 4
"""Batch sizes 1, 2, 3 and 4."""

BYTES = 4 * (6 * 512 + 512 * 8)


@pytest.mark.parametrize("name", ["one", "replicas", "pairs", "shard", "mesh"])
def test_placement_changes_no_answer(machine: Machine, name: str) -> None:
    assert machine.seen[name]["worst"] < 1e-3


def test_replicas_are_on_different_devices(machine: Machine) -> None:
    """Each device has its own parameters and executables."""
    seen = machine.seen["replicas"]

    assert [[index] for index in machine.every] == seen["output_devices"]
    assert [[index] for index in machine.every for _ in ("w1", "w2")] == seen["parameter_devices"]
    assert (BUCKETS * machine.count, BYTES * machine.count) == (
        seen["compilations"],
        seen["parameters_bytes"],
    )


@pytest.mark.slow
def test_replicas_of_one_device_share(machine: Machine) -> None:
    """Two replicas on each of two devices: four execute, two copies hold memory."""
    seen = machine.seen["pairs"]

    assert [[0], [2], [0], [2]] == seen["output_devices"]
    assert [[0], [0], [2], [2]] == seen["parameter_devices"]
    assert (BUCKETS * 2, BYTES * 2) == (seen["compilations"], seen["parameters_bytes"])


def test_shards_are_one_copy_over_all_devices(machine: Machine) -> None:
    """It needs the least memory: no parameter split by a rule exists twice."""
    seen = machine.seen["shard"]

    assert [machine.every] * 2 == seen["parameter_devices"]
    assert (BUCKETS, BYTES) == (seen["compilations"], seen["parameters_bytes"])


def test_data_axis_holds_the_parameters_twice(machine: Machine) -> None:
    seen = machine.seen["mesh"]

    assert [machine.every] * 2 == seen["parameter_devices"]
    assert (BUCKETS, BYTES * 2) == (seen["compilations"], seen["parameters_bytes"])


@pytest.mark.parametrize(
    ("name", "devices"),
    [("one", [0]), ("pairs", [0, 2]), ("replicas", None), ("shard", None), ("mesh", None)],
)
def test_memory_is_booked_on_the_devices_that_hold_it(
    machine: Machine, name: str, devices: list[int] | None
) -> None:
    seen = machine.seen[name]

    expected = {f"cpu:{index}" for index in (machine.every if devices is None else devices)}
    assert expected == set(seen["per_device"])
    assert seen["total_bytes"] == sum(seen["per_device"].values())
    assert seen["predicted"] == pytest.approx(seen["per_device"], rel=0.1)
