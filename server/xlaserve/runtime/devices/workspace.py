"""Workspace of libraries, owned by a device and not by a model."""

import re

SHARED_BYTES = 32 << 20
"""The most workspace per execution that counts as the device's. On Hopper, cuBLAS reserves this
much for every matrix product, however small the model.
"""

AT_ONCE = 2
"""Programs that a device executes at the same time at most: one computes, and the memory of the
next is taken while it does."""

_CALL = re.compile(r"= \((.*?)\) custom-call(?:-start)?\(.*custom_call_target=\"__cu")
_WORKSPACE = re.compile(r"[su]8\[(\d+)\](?:\{[^}]*\})?$")
"""The workspace in the result of a library call: its last element, bytes without a shape. cuBLAS
requests 4 to 32 MiB for every product, however small, and cuDNN for a convolution.
"""


def workspace_bytes(text: str) -> int:
    """Return the largest workspace of a library's call in the optimized HLO of a program.

    Calls follow one another, and XLA gives all of them the same memory.
    """
    ends = (_WORKSPACE.search(call[1]) for call in _CALL.finditer(text))
    return max((int(end[1]) for end in ends if end), default=0)


def shared(workspace: int, temporaries: int) -> int:
    """Return the bytes of temporaries that count once per device, not per execution."""
    return min(workspace, temporaries, SHARED_BYTES)


def device_bytes(platform: str) -> int:
    """Return the device memory reserved for workspaces that models share."""
    return AT_ONCE * SHARED_BYTES if platform == "cuda" else 0
