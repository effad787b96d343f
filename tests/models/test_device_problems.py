"""Unusable devices: a one-line reason, whatever JAX and its plugins report."""

import logging

import pytest

from xlaserve.runtime.devices import device_problems, plugins

# As the CUDA plugin 0.12.0.1 and libtpu say it on a machine without a driver, and without a TPU.
NO_DRIVER = (
    "jaxlib/cuda/versions_helpers.cc:135: operation cuInit(0) failed: Unknown CUDA error 303; "
    "cuGetErrorName failed. This probably means that JAX was unable to load the CUDA libraries."
)
NOT_REGISTERED = (
    "Unable to initialize backend 'cuda': Backend 'cuda' is not in the list of known backends: "
    "['cpu', 'tpu', 'proxy']. (set JAX_PLATFORMS='' to automatically choose an available backend)"
)
NO_TPU = (
    "Unable to initialize backend 'tpu': NOT_FOUND: TPU initialization failed: No jellyfish device "
    "found. (set JAX_PLATFORMS='' to automatically choose an available backend)"
)
# As CUDA's documentation has them; no driver said them here.
TOO_OLD = "operation cuInit(0) failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
OLD_RUNTIME = "operation cudaGetDeviceCount() failed: CUDA driver version is insufficient for CUDA"
OUTDATED = "Outdated CUDA installation found.\nVersion JAX was built against: 12090\nMinimum: 12010"
IN_USE = "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE: busy"
FULL = "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
NONE = "operation cuInit(0) failed: CUDA_ERROR_NO_DEVICE"
TPU_IN_USE = "ABORTED: The TPU is already in use by process with pid 7."


@pytest.mark.parametrize(
    ("device", "said", "expected"),
    [
        (
            "cuda",
            [NO_DRIVER, NOT_REGISTERED],
            "the NVIDIA driver (libcuda.so.1) is missing; in a container, install the NVIDIA"
            " container toolkit",
        ),
        ("cuda", [TOO_OLD], "the NVIDIA driver is too old"),
        ("cuda", [OLD_RUNTIME], "the NVIDIA driver is too old"),
        ("cuda", [OUTDATED], "the NVIDIA driver is too old"),
        ("cuda", [IN_USE], "another process uses the GPU in exclusive compute mode"),
        ("cuda", [FULL], "other processes use too much of the GPU's memory"),
        ("cuda", [NONE], "the driver reports no GPU, check CUDA_VISIBLE_DEVICES"),
        ("tpu", [NO_TPU], "there is no TPU on this machine"),
        ("tpu", [TPU_IN_USE], "another process uses the TPU, which only one process can"),
    ],
)
def test_what_plugins_say_is_told_in_one_line(device: str, said: list[str], expected: str) -> None:
    found = device_problems.reason(device, "cpu", said)

    assert found.startswith(expected)
    assert said[0].split()[-1] in found
    assert "\n" not in found


def test_missing_wheel_is_named_before_what_follows_from_it() -> None:
    found = device_problems.reason("cuda", "cpu", [NOT_REGISTERED])

    assert "jax-cuda12-plugin is not installed: pip install 'xlaserve[cuda12]'" == found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "version", lambda name: "1.0")


@pytest.mark.usefixtures("installed")
def test_what_nobody_knows_is_repeated_in_one_line() -> None:
    found = device_problems.reason("cuda", "cpu", ["something\n  else\n" + "x" * 1000])

    assert found.startswith("something else xxx")
    assert 300 == len(found)


@pytest.mark.usefixtures("installed")
def test_gpu_that_is_not_there_is_not_tried_by_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX stays silent, and runs on the CPU."""
    monkeypatch.setattr(device_problems, "_GPU_FILES", ("/nowhere/nvidia0",))

    assert "there is no NVIDIA GPU on this machine (/nowhere/nvidia0)" == device_problems.reason(
        "cuda", "cpu", []
    )
    assert "JAX runs on cpu" == device_problems.reason("tpu", "cpu", [])


def test_traceback_of_a_plugin_is_heard_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Other lines are logged as usual."""
    logger = logging.getLogger("jax._src.xla_bridge")
    with device_problems.heard() as said:
        error = RuntimeError(NO_DRIVER)
        said_by_jax = "Jax plugin configuration error: Exception when calling initialize()"
        logger.error(said_by_jax, exc_info=error)
        logger.warning("something else")

    assert [NO_DRIVER] == said
    assert ["something else"] == [record.getMessage() for record in caplog.records]
