"""Environment variables of a process that compiles for absent devices.

XLA and its plugins read them only when they start, so a server process cannot use them.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from xlaserve.runtime.devices.target_kinds import Target

_PLATFORM_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        # The plugin refuses to start without a driver.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Hide GPUs of this machine, which are not the target.
        "CUDA_VISIBLE_DEVICES": "-1",
    },
    "tpu": {
        # Without this, it queries a cloud metadata server for minutes.
        "TPU_SKIP_MDS_QUERY": "1",
        # Only one process may use a TPU; this one uses none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cpu": {},
}

_FLAGS: Mapping[str, tuple[str, ...]] = {
    # Disable choices that require measurements on the device.
    "cuda": ("--xla_gpu_enable_triton_gemm=false", "--xla_gpu_autotune_level=0"),
    "tpu": (),
    "cpu": (),
}


_CHOICES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "cuda": ({}, {"xla_gpu_enable_triton_gemm": True}),
}
"""Compiler options among which a server may choose: autotuning on the device picks the faster of
cuBLAS and Triton kernels for a matrix product, and these need different scratch memory."""


def choices(platform: str, module: bytes) -> tuple[Mapping[str, Any], ...]:
    """Return the sets of compiler options that a server may choose from."""
    # The bytecode of a module contains the names of its operations.
    return _CHOICES.get(platform, ({},))[: 2 if b"dot_general" in module else 1]


def flags_of(target: Target, count: int, flags: Sequence[str] = ()) -> tuple[str, ...]:
    """Return XLA's flags for this many target devices; for duplicate flags, the last one wins."""
    devices = (f"--xla_force_host_platform_device_count={count}",)
    return (*(devices if target.platform == "cpu" else ()), *flags, *_FLAGS[target.platform])


def of(
    target: Target,
    count: int = 1,
    flags: Sequence[str] = (),
    inherited: Mapping[str, str] = os.environ,
) -> Mapping[str, str]:
    """Return the environment of a process that compiles for this many devices of a target.

    `flags` are further XLA flags; flags of this process are not inherited.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        # Server settings do not concern a compiler, and XLA aborts on unknown flags.
        if not name.startswith(("XLASERVE_", "JAX_", "XLA_", "LIBTPU_"))
    }
    return {
        **kept,
        **_PLATFORM_VARIABLES[target.platform],
        # Only the CPU executes anything.
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags_of(target, count, flags)),
        "TF_CPP_MIN_LOG_LEVEL": inherited.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
