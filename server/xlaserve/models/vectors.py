"""The width of the vectors that XLA computes with on the CPU. Needs no JAX."""

from xlaserve.models.compilation_cache import features

OPTION = "xla_cpu_prefer_vector_width"
"""XLA's name for it, as an option of a program and as a flag of a process."""
BITS = 512
"""Those of AVX-512. By itself XLA takes 256 bits: the first processors that had wider ones slowed
all of their cores down for them."""
FEATURE = "avx512_bf16"
"""What processors have that hardly do: AMD's since Zen 4, Intel's since Sapphire Rapids, and the
rare Cooper Lake before it."""


def options(flags: str) -> dict[str, bool | int | str]:
    """Return the options of a program for the CPU of this machine.

    They say nothing of the width where the flags of XLA, those of this process, say it.
    """
    if OPTION in flags or FEATURE not in features():
        return {}
    return {OPTION: BITS}
