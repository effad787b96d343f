"""Library workspace memory that all models on a device share."""

import re

SHARED_BYTES = 32 << 20
"""Executions that need at most this much workspace share it on their device. On Hopper, cuBLAS
reserves this much for every matrix product, however small the model.
"""

AT_ONCE = 2
"""Maximum number of programs with memory on a device at the same time: one computes, and XLA
already allocates for the next.
"""

_CALL = re.compile(r"= \((.*?)\) custom-call(?:-start)?\(.*custom_call_target=\"__cu")
_WORKSPACE = re.compile(r"[su]8\[(\d+)\](?:\{[^}]*\})?$")
"""The workspace in the result of a library call: the last element, bytes without a shape. cuBLAS
requests 4 to 32 MiB for every product, however small, and cuDNN for a convolution.
"""


def workspace_bytes(text: str) -> int:
    """Return the largest workspace of any library call in a program's optimized HLO.

    Library calls run one after the other, and XLA gives all of them the same memory.
    """
    ends = (_WORKSPACE.search(call[1]) for call in _CALL.finditer(text))
    return max((int(end[1]) for end in ends if end), default=0)


def shared(workspace: int, temporaries: int) -> int:
    """Return the temporary bytes that count once per device instead of once per execution."""
    return min(workspace, temporaries, SHARED_BYTES)


def device_bytes(platform: str) -> int:
    """Return the device memory reserved for workspaces that models share."""
    return AT_ONCE * SHARED_BYTES if platform == "cuda" else 0
