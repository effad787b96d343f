"""Memory of model copies on simulated devices: on the host, on GPUs and on TPUs."""

from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.runtime.programs.held_memory import growth_of, memory_of

PROGRAMS = (
    Footprint(100, 7, arguments_bytes=120, constants_bytes=500, code_bytes=3),
    Footprint(100, 7, arguments_bytes=150, constants_bytes=400, code_bytes=4),
)
"""Programs with 100 bytes of parameters, and inputs of 20 and 50 bytes."""


def _copy(platform: str, *devices: int, replicas: int = 1) -> Any:
    accelerated = platform != "cpu"
    return SimpleNamespace(
        leaves_bytes=93,
        in_flight=replicas * (IN_FLIGHT if accelerated else 1),
        programs=[SimpleNamespace(footprint=footprint) for footprint in PROGRAMS],
        site=SimpleNamespace(
            device_names=tuple(f"{platform}:{index}" for index in devices),
            is_accelerator=accelerated,
            platform=platform,
        ),
    )


@pytest.mark.parametrize(("platform", "constants"), [("cuda", 500), ("tpu", 900)])
def test_an_accelerator_holds_what_its_compiler_says(platform: str, constants: int) -> None:
    """A GPU stores equal constants once; the module stays on the host."""
    found = memory_of([_copy(platform, 0)], module_bytes=10_000)

    assert 93 + 7 == found.parameters_bytes
    assert constants == found.constants_bytes
    assert IN_FLIGHT * 50 == found.temporaries_bytes
    assert 3 + 4 == found.executables_bytes
    assert {f"{platform}:0": found.total_bytes} == dict(found.per_device)


def test_replicas_share_all_but_what_is_in_flight() -> None:
    one, two = (memory_of([_copy("cuda", 0, replicas=count)], 0) for count in (1, 2))

    assert 2 * one.temporaries_bytes == two.temporaries_bytes
    assert one.total_bytes + IN_FLIGHT * 50 == two.total_bytes


def test_the_host_holds_the_module_once() -> None:
    found = memory_of([_copy("cpu", 0), _copy("cpu", 1)], module_bytes=10_000)

    assert 0 == found.constants_bytes
    assert 10_000 + 2 * (3 + 4) == found.executables_bytes
    assert 10_000 == found.per_device["cpu:0"] - found.per_device["cpu:1"]


def test_devices_of_a_shard_hold_the_same() -> None:
    found = memory_of([_copy("tpu", 0, 1)], 0)

    assert found.per_device["tpu:0"] == found.per_device["tpu:1"] == found.total_bytes // 2


def test_code_of_which_nothing_is_known_is_estimated() -> None:
    copy = _copy("cuda", 0)
    copy.programs = [SimpleNamespace(footprint=Footprint())]

    assert EXECUTABLE_BYTES == memory_of([copy], 0).executables_bytes


@pytest.mark.parametrize(("platform", "module"), [("cpu", 10_000), ("cuda", 0)])
def test_more_programs_grow_by_the_largest_code_there_is(platform: str, module: int) -> None:
    found = growth_of([_copy(platform, 0)], 10_000, programs=3)

    assert {f"{platform}:0": 3 * 4 + module} == found
