"""The settings of a worker: its share of the limits, and what several processes cannot obey."""

from dataclasses import replace
from pathlib import Path

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.processes.shares import (
    SHARED,
    UNSUPPORTED,
    check_supported,
    decoded,
    encoded,
    share_of,
)
from xlaserve.settings import Settings
from xlaserve.settings_choices import Device, ProcessCount, TlsEndpoint

SETTINGS = Settings(repository=Path("models"), processes=ProcessCount(4))


def test_settings_arrive_as_they_were_sent() -> None:
    """Through JSON, of every type."""
    given = replace(
        SETTINGS,
        model_root=(Path("/a"), Path("/b")),
        tls_endpoints=(TlsEndpoint.GRPC,),
        grace_seconds=1.5,
        load_threads=3,
    )

    assert given == decoded(encoded(given))


def test_shares_add_up_to_the_limit() -> None:
    """Bytes are rounded down, counts up: nobody is refused who is within the limit."""
    given = replace(SETTINGS, max_held_bytes=(1 << 30) + 3, max_connections=10, execute_threads=8)
    share = share_of(given)

    assert (1 << 28, 3, 2) == (share.max_held_bytes, share.max_connections, share.execute_threads)


def test_a_share_of_a_capacity_that_is_not_set_is_one_of_the_memory() -> None:
    """Each worker would fill all of it."""
    whole = share_of(replace(SETTINGS, processes=ProcessCount(1)))
    share = share_of(SETTINGS)

    assert (0, whole.container_memory_bytes // 4) == (
        share.capacity_bytes,
        share.container_memory_bytes,
    )
    assert whole.container_memory_bytes > 1 << 30


@pytest.mark.parametrize("name", SHARED)
def test_a_share_is_never_too_little_for_a_setting(name: str) -> None:
    """Many processes of a small server start nevertheless."""
    many = replace(SETTINGS, processes=ProcessCount(1024))

    share_of(many)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evict", True),
        ("trace_file", "/tmp/trace"),
        ("device", Device.CUDA),
        ("access_log", "fd:3"),
    ],
)
def test_what_several_processes_cannot_obey_is_refused(name: str, value: object) -> None:
    """By the name of a setting; one process obeys it."""
    refused = replace(SETTINGS, **{name: value})  # type: ignore[arg-type]

    with pytest.raises(InvalidSettings, match=r"processes"):
        check_supported(refused)
    check_supported(SETTINGS)


def test_every_refusal_is_by_a_setting() -> None:
    """The operator looks for its name."""
    assert set(UNSUPPORTED) <= set(encoded(SETTINGS))
