import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.runtime.devices.target_kinds import TARGETS, named, of_kind


def test_a_name_finds_its_row_however_it_is_written() -> None:
    assert TARGETS["h100"] is named("H100")


def test_a_name_that_is_none_is_told_those_that_are() -> None:
    with pytest.raises(DeviceUnavailable, match=r"device 'h900' .* expected one of h100, h200, "):
        named("h900")


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA A100-SXM4-40GB", "a100-40"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("cuda", "TPU v4", None),
        ("cuda", "Tesla T4", None),
        ("cpu", "cpu", None),
    ],
)
def test_a_device_that_is_present_is_known_by_what_jax_calls_it(
    platform: str, kind: str, expected: str | None
) -> None:
    found = of_kind(platform, kind)

    assert expected == (found and found.name)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [("h100", 8, "1x1x8"), ("v5e", 1, "v5e:1x1"), ("v5e", 8, "v5e:2x4"), ("cpu", 2, "1x1x2")],
)
def test_devices_of_one_host_have_a_topology(name: str, count: int, expected: str) -> None:
    assert expected == named(name).topology(count)


@pytest.mark.parametrize(
    ("name", "count", "expected"), [("h100", 3, "1, 2, 4, 8"), ("v4", 8, "1, 2, 4")]
)
def test_a_count_that_no_host_has_is_refused(name: str, count: int, expected: str) -> None:
    with pytest.raises(DeviceUnavailable, match=f"expected {expected} devices, got {count}"):
        named(name).topology(count)


def test_xla_knows_a_gpu_by_what_its_row_says() -> None:
    lines = [line.strip() for line in named("h100").config.splitlines()]

    assert "core_count: 132" in lines
    assert "device_memory_size: 84942979072" in lines
    assert "shared_memory_per_block_optin: 232448" in lines
    assert "cuda_compute_capability { major: 9 minor: 0 }" in lines
    assert "runtime_version { major: 12 minor: 8 }" in lines
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in lines


def test_every_accelerator_says_what_it_is_and_how_that_is_known() -> None:
    for row in TARGETS.values():
        if row.platform != "cpu":
            assert row.memory_bytes > 8 << 30
            assert row.kind
            assert bool(row.gpu) is (row.platform == "cuda")
            assert bool(row.topologies) is (row.platform == "tpu")
        assert row.verified
