"""Chooses a model's devices from its configuration: replicas or shards. Does not import JAX.

`instance_group` sets the number of replicas per GPU. xlaserve's own parameters set the rest:
`devices` ("0,2" or "all"), `placement` ("replica" or "shard"), and for a sharded model `partition`,
`{"layers/*/w": [null, "model"]}`, and `mesh`, "data=2,model=4".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import NoReturn, TypeAlias

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.model_config.buckets import SPLIT_BATCHES
from xlaserve.model_config.config import ModelConfig
from xlaserve_proto import inference

MAX_REPLICAS = 256
"""Maximum number of replicas of a model."""

DATA_AXIS = "data"
"""The mesh axis over which batches are split."""

MODEL_AXIS = "model"
"""Name of the only mesh axis if the configuration does not describe a mesh."""

Axes: TypeAlias = "str | tuple[str, ...] | None"
"""Mesh axes over which one dimension of a parameter is split, or None if it is not split."""

_KIND = inference.ModelInstanceGroupKind
_KINDS: Mapping[int, str] = {
    _KIND.KIND_AUTO: "KIND_AUTO",
    _KIND.KIND_GPU: "KIND_GPU",
    _KIND.KIND_CPU: "KIND_CPU",
    _KIND.KIND_MODEL: "KIND_MODEL",
}


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a server."""

    platform: str
    """JAX platform: cpu, cuda or tpu."""
    count: int
    kind: str = ""
    """JAX's name for the first device (`NVIDIA L4`), or an empty string if unknown."""
    capabilities: tuple[str, ...] = ()
    """CUDA compute capability of each device (`9.0`); empty on other platforms."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the devices' names in the memory ledger."""
        return tuple(device_name(self.platform, index) for index in range(self.count))

    @staticmethod
    def named(names: Sequence[str], kind: str = "") -> "Devices | None":
        """Return the devices with these names, or None if there are none."""
        return Devices(names[0].partition(":")[0], len(names), kind) if names else None


ONE_CPU = Devices("cpu", 1)


def device_name(platform: str, index: int) -> str:
    """Return a device's name in the memory ledger: `cpu:0`."""
    # Do not use the device's own platform name: a CUDA device calls it gpu.
    return f"{platform}:{index}"


@dataclass(frozen=True, slots=True)
class Group:
    """A set of devices, each with the same number of replicas."""

    devices: tuple[int, ...] | None = (0,)
    """Device indexes on the platform, or None for all devices."""
    count: int = 1
    is_of_model: bool = False
    """Whether the model's code chooses its devices (KIND_MODEL). Exported computations use the
    first device.
    """

    def indexes(self, platform: str, present: int) -> Sequence[int]:
        """Return the device indexes; raises InvalidModel if a device does not exist."""
        if self.devices is None:
            return range(present)
        for index in self.devices:
            if not 0 <= index < present:
                raise InvalidModel(
                    f"device {index} does not exist: this server has {present} of {platform},"
                    " counted from 0"
                )
        return self.devices


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one replica is sharded over the devices of its group."""

    mesh: Mapping[str, int]
    """Axis name -> size, in order; empty for a single axis over all devices."""
    partition: Mapping[str, tuple[Axes, ...]]
    """Glob of parameter names -> mesh axes of each dimension; the first match wins."""

    def rule(self, name: str) -> tuple[Axes, ...] | None:
        """Return the mesh axes of a parameter's dimensions, or None if no rule matches."""
        return next(
            (axes for glob, axes in self.partition.items() if fnmatchcase(name, glob)), None
        )

    def parts(self, name: str, devices: int) -> int:
        """Return the number of shards of a parameter on this number of devices."""
        mesh = mesh_of(self, devices)
        split = (axis for axes in self.rule(name) or () for axis in axis_names(axes))
        return prod(mesh.get(axis, 1) for axis in split)


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a model."""

    platform: str
    """JAX platform: cpu, cuda or tpu."""
    groups: tuple[Group, ...] = field(default=(Group(),))
    """Device groups; a sharded model has exactly one."""
    sharding: Sharding | None = None

    def seats(self, present: int) -> Iterator[int]:
        """Yield the device of each replica, group by group, round-robin over a group's devices."""
        for group in self.groups:
            for _ in range(group.count):
                yield from group.indexes(self.platform, present)


def read(config: ModelConfig, platform: str) -> Placement:
    """Return the placement that a configuration requests on this platform.

    Raises InvalidModel for contradictory fields and for platforms or devices that do not exist.
    """
    platform, groups = _instance_groups(config, platform)
    devices = config.parameters.get("devices")
    if devices is not None:
        groups = (Group(_indexes(devices), _one_count(config, groups)),)
    sharding = _sharding(config)
    if sharding is not None and len(groups) > 1:
        _refuse("placement", "one instance_group for a sharded model", str(len(groups)))
    return Placement(platform, groups, sharding)


def without_effect(config: ModelConfig, platform: str) -> tuple[str, ...]:
    """Return the configuration fields that only affect another platform than the server's."""
    is_split = SPLIT_BATCHES in config.parameters
    groups = () if config.message is None else config.message.instance_group
    listed = platform == "cpu" and any(group.gpus for group in groups)
    files = config.cc_model_filenames and read(config, platform).platform != "cuda"
    return (
        *(("instance_group.gpus",) if listed else ()),
        *(("cc_model_filenames",) if files else ()),
        *((f"parameters[{SPLIT_BATCHES}]",) if platform != "cpu" and is_split else ()),
    )


def with_file_of(config: ModelConfig, devices: Devices) -> ModelConfig:
    """Return the configuration with the model file for its devices' compute capability.

    The file is the entry of `cc_model_filenames` for that capability, or else
    `default_model_filename`. Raises InvalidModel if the devices have different capabilities that
    name different files.
    """
    if not config.cc_model_filenames:
        return config
    wanted = read(config, devices.platform)
    if wanted.platform != devices.platform or not devices.capabilities:
        return config
    default = config.default_model_filename
    files = {
        seat: config.cc_model_filenames.get(devices.capabilities[seat]) or default
        for seat in sorted(set(wanted.seats(devices.count)))
    }
    if len(set(files.values())) > 1:
        listed = ", ".join(f"'{file}' for device {seat}" for seat, file in files.items())
        raise InvalidModel(
            "cc_model_filenames: expected the same file for all devices of the model, got"
            f" {listed[:300]}"
        )
    return replace(config, default_model_filename=next(iter(files.values())))


def axis_names(axes: Axes) -> tuple[str, ...]:
    """Return the names of the mesh axes that split one dimension."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _refuse(parameter: str, expected: str, got: str) -> NoReturn:
    raise InvalidModel(f"parameter '{parameter}': expected {expected}, got {got[:64]}")


# --- instance_group ----------------------------------------------------------------------------


def _instance_groups(config: ModelConfig, platform: str) -> tuple[str, tuple[Group, ...]]:
    written = () if config.message is None else config.message.instance_group
    if not written:
        return platform, (Group(),)
    found = [_instance_group(index, group, platform) for index, group in enumerate(written)]
    platforms = {where for where, _ in found}
    if len(platforms) > 1:
        raise InvalidModel("instance_group: expected all groups on GPUs, or all on the CPU")
    groups = tuple(group for _, group in found)
    total = sum(group.count * len(group.devices or (0,)) for group in groups)
    if total > MAX_REPLICAS:
        raise InvalidModel(f"instance_group: expected {MAX_REPLICAS} copies at most, got {total}")
    return platforms.pop(), groups


def _instance_group(
    index: int, group: inference.ModelInstanceGroup, platform: str
) -> tuple[str, Group]:
    place = f"instance_group[{index}]"
    if group.kind not in _KINDS:
        raise InvalidModel(f"{place}.kind: expected {', '.join(_KINDS.values())}")
    if group.count < 0:
        raise InvalidModel(f"{place}.count: expected 1 or more, got {group.count}")
    if group.kind == _KIND.KIND_GPU and platform == "cpu":
        raise InvalidModel(f"{place}.kind: KIND_GPU, but this server runs on cpu")
    if group.kind in (_KIND.KIND_CPU, _KIND.KIND_MODEL) and group.gpus:
        kind = _KINDS[group.kind]
        raise InvalidModel(f"{place}.gpus: expected none for {kind}, got {list(group.gpus)}")
    count = group.count or 1
    if group.kind == _KIND.KIND_MODEL:
        return platform, Group(count=count, is_of_model=True)
    if group.kind == _KIND.KIND_CPU or platform == "cpu":
        return "cpu", Group(count=count)
    if len(set(group.gpus)) < len(group.gpus):
        raise InvalidModel(f"{place}.gpus: expected each GPU once, got {list(group.gpus)}")
    return platform, Group(tuple(group.gpus) or None, count)


def _one_count(config: ModelConfig, groups: Sequence[Group]) -> int:
    listed = config.message is not None and any(g.gpus for g in config.message.instance_group)
    if len(groups) > 1 or listed:
        _refuse("devices", "devices in only one of the two", "also an instance_group with devices")
    return groups[0].count


# --- parameters --------------------------------------------------------------------------------


def _indexes(text: str) -> tuple[int, ...] | None:
    if text.strip() == "all":
        return None
    try:
        found = tuple(int(index) for index in text.split(","))
    except ValueError:
        _refuse("devices", '"all" or indexes like "0,1"', f"'{text}'")
    if len(set(found)) < len(found):
        _refuse("devices", "each device once", f"'{text}'")
    return found


def _sharding(config: ModelConfig) -> Sharding | None:
    mode = config.parameters.get("placement", "replica")
    if mode not in ("replica", "shard"):
        _refuse("placement", "replica or shard", f"'{mode}'")
    if mode == "replica":
        for name in ("partition", "mesh"):
            if name in config.parameters:
                _refuse(name, 'placement "shard" with it', "placement 'replica'")
        return None
    return Sharding(_mesh(config.parameters.get("mesh", "")), _partition(config))


def _mesh(text: str) -> Mapping[str, int]:
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or name in axes or not size.isdecimal() or not int(size):
            _refuse("mesh", 'axes like "data=2,model=4"', f"'{text}'")
        axes[name] = int(size)
    return MappingProxyType(axes)


def _partition(config: ModelConfig) -> Mapping[str, tuple[Axes, ...]]:
    text = config.parameters.get("partition", "")
    expected = 'rules like {"layers/*/w": [null, "model"]}'
    try:
        rules = msgspec.json.decode(text, type=dict[str, list[str | list[str] | None]])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        _refuse("partition", expected, f"'{text}'")
    if not rules:
        _refuse("partition", expected, "none")
    return MappingProxyType(
        {
            glob: tuple(tuple(axes) if isinstance(axes, list) else axes for axes in spec)
            for glob, spec in rules.items()
        }
    )


def mesh_of(sharding: Sharding, devices: int) -> Mapping[str, int]:
    """Return the mesh axes and sizes for this number of devices; raises InvalidModel."""
    mesh = sharding.mesh or {MODEL_AXIS: devices}
    if prod(mesh.values()) != devices:
        written = ",".join(f"{name}={size}" for name, size in mesh.items())
        _refuse("mesh", f"axes for {devices} devices", f"'{written}'")
    return mesh
