"""Cache keys of compiled programs, as human-readable text."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax

from xlaserve.runtime.devices import plugins
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.programs.compilation_cache import processor

_CONFIGURATION = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
)
"""JAX options that affect lowering or compilation."""

UNKNOWN = "not known without the device"
"""CUDA version in the keys of programs that were compiled ahead of time. The plugin's version
determines it, and a driver that is too old refuses to load the program.
"""

_C_API = "PJRT C API\n"
_SEVERAL = re.compile(r"[^A-Za-z0-9.]+")
_MAX_TARGET_CHARACTERS = 100


def target_of(platform: str, device_kind: str) -> str:
    """Return a directory name shared by all machines that can share programs."""
    if platform == "cpu":
        return f"cpu-{processor()}"
    return _SEVERAL.sub("-", f"{platform}-{device_kind}")[:_MAX_TARGET_CHARACTERS]


def environment(
    site: Site, options: Mapping[str, object], given_flags: str, *, is_ahead: bool = False
) -> dict[str, str]:
    """Return the environment part of a key: versions, flags, kind of device, topology.

    `is_ahead`: the program is compiled without the devices.
    """
    device = site.devices[0]
    # Devices behind the PJRT C API have this prefix in their version, compile-only devices do not.
    platform_version = str(device.client.platform_version).removeprefix(_C_API)
    if is_ahead and site.platform == "cuda":
        platform_version = UNKNOWN
    installed = plugins.versions(site.platform)
    described = {
        "jax": jax.__version__,
        "jaxlib": plugins.version("jaxlib"),
        "plugin": ", ".join(f"{name} {found}" for name, found in installed.items()),
        "platform": site.platform,
        "platform_version": platform_version,
        "device_kind": str(device.device_kind),
        "topology": _topology(site),
        "flags": given_flags,
        "options": " ".join(f"{name}={value}" for name, value in sorted(options.items())),
        "configuration": " ".join(_configuration()),
    }
    if site.platform == "cpu":
        # On the CPU, XLA splits work into as many parts as there are threads.
        described |= {"processor": processor(), "threads": _threads()}
    return described


def program(
    site: Site,
    computation: str,
    packing: str,
    arguments: Sequence[Any],
    outputs: "jax.sharding.Sharding | None",
) -> dict[str, str]:
    """Return the program part of a key: the computation, its arguments and their placement.

    `packing` describes the small parameters in these arguments.
    """
    return {
        "computation": computation,
        "packing": packing,
        "arguments": "; ".join(map(_argument, arguments)),
        "outputs": "" if outputs is None else _sharding(outputs),
        "devices": ",".join(str(device.id) for device in site.devices),
    }


def in_process(
    site: Site,
    packing: str,
    arguments: Sequence[Any],
    outputs: "jax.sharding.Sharding | None",
    options: Mapping[str, object],
) -> Hashable:
    """Return a key that distinguishes the programs of one computation in this process.

    Versions, flags and processor cannot differ within a process.
    """
    return (
        site.platform,
        tuple(device.id for device in site.devices),
        packing,
        # Use the dtype itself, not its name: numpy takes 40 us to compute the name.
        tuple((one.dtype, tuple(one.shape), _sharding(one.sharding)) for one in arguments),
        None if outputs is None else _sharding(outputs),
        tuple(sorted(options.items())),
        tuple(_configuration()),
    )


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return the first field in which two keys differ, or an empty string if they are equal."""
    for name in dict.fromkeys((*expected, *found)):
        ours, theirs = expected.get(name, ""), found.get(name, "")
        if theirs not in (ours, UNKNOWN):
            return f"{name}: expected '{_shown(ours)}', got '{_shown(theirs)}'"
    return ""


_SHOWN_CHARACTERS = 200


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _topology(site: Site) -> str:
    """Return the topology of the devices if the program can depend on it."""
    client = site.devices[0].client
    if len(site.devices) == 1 and site.platform != "tpu":
        return "1"
    places = [device.coords if site.platform == "tpu" else device.id for device in site.devices]
    return f"{len(site.devices)} of {client.device_count()}: {places}"


def _configuration() -> Iterable[str]:
    for name in _CONFIGURATION:
        value = getattr(cast("Any", jax.config), name, None)
        if value is not None:
            yield f"{name}={value}"


def _threads() -> str:
    # XLA reads NPROC for the size of its thread pool.
    return os.environ.get("NPROC") or str(len(os.sched_getaffinity(0)))


def _argument(array: Any) -> str:
    return f"{array.dtype.name}{list(array.shape)} {_sharding(array.sharding)}"


def _sharding(sharding: Any) -> str:
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return "whole"
    return f"{tuple(sharding.spec)} over {dict(mesh.shape)}"
