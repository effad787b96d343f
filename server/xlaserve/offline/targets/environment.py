"""Environment variables of a process that compiles for absent devices.

XLA and the plugins read them once, when they start: so they are never those of a server.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from xlaserve.runtime.devices.target_kinds import Target

_PLATFORM_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        # The plugin refuses to start where it finds no driver.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # A GPU that is there is none of those that are compiled for.
        "CUDA_VISIBLE_DEVICES": "-1",
    },
    "tpu": {
        # It would ask the metadata server of a cloud, for minutes.
        "TPU_SKIP_MDS_QUERY": "1",
        # One process at a time may have a TPU; these have none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cpu": {},
}

_FLAGS: Mapping[str, tuple[str, ...]] = {
    # What is tried on a device to be chosen cannot be.
    "cuda": ("--xla_gpu_enable_triton_gemm=false", "--xla_gpu_autotune_level=0"),
    "tpu": (),
    "cpu": (),
}


_CHOICES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "cuda": ({}, {"xla_gpu_enable_triton_gemm": True}),
}
"""Options of compilations of which a server may come to any: its device tries a product with cuBLAS
and with Triton's kernels, which take other scratch memory, and takes the quicker."""


def choices(platform: str, module: bytes) -> tuple[Mapping[str, Any], ...]:
    """Return the sets of compiler options whose results a server may need."""
    # The names of operations are in the bytecode of a module.
    return _CHOICES.get(platform, ({},))[: 2 if b"dot_general" in module else 1]


def flags_of(target: Target, count: int, flags: Sequence[str] = ()) -> tuple[str, ...]:
    """Return XLA's flags for this many target devices; the last flag of a name wins."""
    devices = (f"--xla_force_host_platform_device_count={count}",)
    return (*(devices if target.platform == "cpu" else ()), *flags, *_FLAGS[target.platform])


def of(
    target: Target,
    count: int = 1,
    flags: Sequence[str] = (),
    inherited: Mapping[str, str] = os.environ,
) -> Mapping[str, str]:
    """Return the environment of a process that compiles for this many devices of a target.

    `flags` are further ones for XLA; those of this process are not handed down.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        # A server's settings are nothing to a compiler, and a flag that XLA does not know ends it.
        if not name.startswith(("XLASERVE_", "JAX_", "XLA_", "LIBTPU_"))
    }
    return {
        **kept,
        **_PLATFORM_VARIABLES[target.platform],
        # Nothing is executed but on the CPU.
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags_of(target, count, flags)),
        "TF_CPP_MIN_LOG_LEVEL": inherited.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
