"""Explains in one line why a device cannot be used, based on JAX's messages."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from xlaserve.runtime.devices import plugins

_LOGGER = "jax._src.xla_bridge"
_CONFIGURATION = "Jax plugin configuration error"
"""Prefix of the log record, with a traceback, that JAX writes when a plugin fails."""

_KNOWN: Mapping[str, Sequence[tuple[str, str]]] = {
    "cuda": (
        (
            r"unable to load the CUDA libraries|libcuda\.so|Unknown CUDA error 303",
            "the NVIDIA driver (libcuda.so.1) is missing; in a container, install the NVIDIA"
            " container toolkit",
        ),
        (
            r"driver version is insufficient|DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED|Outdated CUDA",
            "the NVIDIA driver is too old for the CUDA that JAX was installed with",
        ),
        (
            r"DEVICE_UNAVAILABLE|busy or unavailable",
            "another process uses the GPU in exclusive compute mode",
        ),
        (
            r"OUT_OF_MEMORY|RESOURCE_EXHAUSTED|out of memory",
            "other processes use too much of the GPU's memory",
        ),
        (
            r"NO_DEVICE|no CUDA-capable device|[Nn]o supported devices|provides no devices",
            "the driver reports no GPU, check CUDA_VISIBLE_DEVICES",
        ),
    ),
    "tpu": (
        (r"already in use|lockfile", "another process uses the TPU, which only one process can"),
        (r"No \w+ device found|provides no devices", "there is no TPU on this machine"),
    ),
}
"""Message patterns and their explanations, by platform. The first match wins."""

_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device files; JAX does not try CUDA if all are missing."""

_SHOWN_CHARACTERS = 300


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect JAX's messages about skipped plugins within the block instead of logging them."""
    messages: list[str] = []

    def listen(record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(_CONFIGURATION):
            return True
        error = record.exc_info[1] if record.exc_info else None
        messages.append(str(error or record.getMessage()))
        return False

    logger = logging.getLogger(_LOGGER)
    logger.addFilter(listen)
    try:
        yield messages
    finally:
        logger.removeFilter(listen)


def reason(device: str, running_on: str, messages: Sequence[str]) -> str:
    """Return why JAX runs on another platform than requested."""
    # Plugin messages come first: they are more specific than JAX's own error.
    for text in messages:
        for pattern, meaning in _KNOWN.get(device, ()):
            if re.search(pattern, text):
                return f"{meaning} ({_line(text)})"
    if missing := plugins.missing(device):
        return missing
    if messages:
        return _line(messages[0])
    if device == "cuda" and not any(Path(name).exists() for name in _GPU_FILES):
        return f"there is no NVIDIA GPU on this machine ({_GPU_FILES[0]})"
    return f"JAX runs on {running_on}"


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:_SHOWN_CHARACTERS] or "JAX gives no reason"
