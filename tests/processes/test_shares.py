"""Settings of a worker: its share of the limits, and settings that need a single process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device, ProcessCount, ProcessRoles, TlsEndpoint
from xlaserve.workers.messages import Part
from xlaserve.workers.shares import (
    SHARED,
    SPARE_BYTES,
    UNSUPPORTED,
    check_supported,
    decoded,
    encoded,
    offloads,
    parts_of,
    share_of,
)

SETTINGS = Settings(repository=Path("models"), processes=ProcessCount(4))


def test_settings_arrive_as_they_were_sent() -> None:
    """Through JSON, for settings of every type."""
    given = replace(
        SETTINGS,
        model_root=(Path("/a"), Path("/b")),
        tls_endpoints=(TlsEndpoint.GRPC,),
        grace_seconds=1.5,
        load_threads=3,
    )

    assert given == decoded(encoded(given))


def test_shares_add_up_to_the_limit() -> None:
    """Bytes are rounded down, counts up: no client within the limit is refused."""
    given = replace(SETTINGS, max_held_bytes=(1 << 30) + 3, max_connections=10, execute_threads=8)
    share = share_of(given)

    assert (1 << 28, 3, 2) == (share.max_held_bytes, share.max_connections, share.execute_threads)


def test_a_share_of_a_capacity_that_is_not_set_is_one_of_the_memory() -> None:
    """Otherwise each worker would fill all of it."""
    whole = share_of(replace(SETTINGS, processes=ProcessCount(1)))
    share = share_of(SETTINGS)

    assert (0, whole.container_memory_bytes // 4) == (
        share.capacity_bytes,
        share.container_memory_bytes,
    )
    assert whole.container_memory_bytes > 1 << 30


@pytest.mark.parametrize("name", SHARED)
def test_a_share_is_never_too_little_for_a_setting(name: str) -> None:
    """Many processes of a small server must still start."""
    many = replace(SETTINGS, processes=ProcessCount(1024))

    share_of(many)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evict", True),
        ("trace_file", "/tmp/trace"),
        ("access_log", "fd:3"),
    ],
)
def test_what_several_processes_cannot_obey_is_refused(name: str, value: object) -> None:
    """The error names the setting; a single process accepts it."""
    refused = replace(SETTINGS, **{name: value})  # type: ignore[arg-type]

    with pytest.raises(InvalidSettings, match=r"processes"):
        check_supported(refused)
    check_supported(SETTINGS)


def test_workers_cannot_share_an_accelerator() -> None:
    """Only one process can own it: others become front ends, unless workers are requested."""
    given = replace(SETTINGS, device=Device.CUDA)
    check_supported(given)

    with pytest.raises(InvalidSettings, match="process_roles"):
        check_supported(replace(given, process_roles=ProcessRoles.WORKERS))


@pytest.mark.parametrize(
    ("roles", "device", "expected"),
    [
        (ProcessRoles.AUTO, Device.AUTO, ["worker"] * 4),
        (ProcessRoles.AUTO, Device.CPU, ["worker"] * 4),
        (ProcessRoles.AUTO, Device.CUDA, ["engine", *["front end"] * 3]),
        (ProcessRoles.FRONT_ENDS, Device.CPU, ["engine", *["front end"] * 3]),
        (ProcessRoles.WORKERS, Device.TPU, ["worker"] * 4),
    ],
)
def test_the_parts_of_processes_follow_the_settings(
    roles: ProcessRoles, device: Device, expected: list[str]
) -> None:
    """Either one engine with front ends, or equal workers."""
    given = replace(SETTINGS, process_roles=roles, device=device)

    assert expected == [part.value for part in parts_of(given)]


def test_the_engine_has_what_is_for_models_and_front_ends_what_is_for_clients() -> None:
    """No share is given to both."""
    given = replace(
        SETTINGS,
        process_roles=ProcessRoles.FRONT_ENDS,
        capacity_bytes=8 << 30,
        max_held_bytes=4 << 30,
        max_connections=30,
        response_cache_bytes=1 << 20,
        access_rules="rules.toml",
    )
    engine, front = (share_of(given, part) for part in (Part.ENGINE, Part.FRONT_END))

    assert (8 << 30, 1 << 20, 1, "") == (
        engine.capacity_bytes,
        engine.response_cache_bytes,
        engine.processes,
        engine.access_rules,
    )
    assert (10, 0, "rules.toml") == (
        front.max_connections,
        front.response_cache_bytes,
        front.access_rules,
    )
    assert [1 << 30] * 2 == [engine.max_held_bytes, front.max_held_bytes]


def test_a_spare_engine_takes_memory_of_the_engine() -> None:
    given = replace(SETTINGS, process_roles=ProcessRoles.FRONT_ENDS, container_memory_bytes=4 << 30)
    with_spare, without = (
        share_of(replace(given, spare_engine=has), Part.ENGINE).container_memory_bytes
        for has in (True, False)
    )

    assert (4 << 30, (4 << 30) - SPARE_BYTES) == (without, with_spare)


def test_what_front_ends_cannot_obey_is_refused() -> None:
    """The error names the setting; workers accept it."""
    given = replace(SETTINGS, modelmesh=True)
    check_supported(given)

    with pytest.raises(InvalidSettings, match=r"modelmesh.*front-ends"):
        check_supported(replace(given, process_roles=ProcessRoles.FRONT_ENDS))


def test_every_refusal_is_by_a_setting() -> None:
    """Operators look for the setting's name."""
    assert set(UNSUPPORTED) <= set(encoded(SETTINGS))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"offload_seconds": 0.0}, False),
        ({"processes": ProcessCount(1)}, False),
        ({"process_roles": ProcessRoles.FRONT_ENDS}, False),
    ],
)
def test_workers_execute_batches_for_one_another(given: dict[str, Any], expected: bool) -> None:
    """If there are several of them, unless a setting disables it."""
    assert expected == offloads(replace(SETTINGS, **given))
