"""Distinguishes device failures from request errors and out-of-memory errors."""

import re
import sys

from xlaserve.errors import causes

_OF_DEVICES = re.compile(r"(INTERNAL|UNKNOWN|ABORTED|UNAVAILABLE|DATA_LOSS|DEADLINE_EXCEEDED): ")
"""XLA statuses that indicate a faulty device rather than a faulty request. Requests fail with
INVALID_ARGUMENT, OUT_OF_RANGE, FAILED_PRECONDITION or UNIMPLEMENTED, and a lack of memory with
RESOURCE_EXHAUSTED.
"""

_EXHAUSTED = "RESOURCE_EXHAUSTED: "
_SHOWN_CHARACTERS = 300


def device_failure(error: BaseException | None) -> str | None:
    """Return the first line of a device failure, or None for any other error."""
    # Do not import jax here: if no module has imported it, nothing can have failed in it.
    errors = sys.modules.get("jax.errors")
    if errors is None:
        return None
    for one in causes(error):
        if isinstance(one, errors.JaxRuntimeError):
            line = str(one).partition("\n")[0]
            if _OF_DEVICES.match(line) and _EXHAUSTED not in line:
                return line[:_SHOWN_CHARACTERS]
    return None
