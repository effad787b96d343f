"""Load failures for want of disk, quota or open files: not the model's fault."""

import errno
import resource
from typing import TypeAlias

from xlaserve.errors import (
    FilesMissing,
    LoadFailed,
    OutOfFiles,
    OutOfSpace,
    StoreUnavailable,
    causes,
)
from xlaserve.storage.objects import StoreProblem

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The error numbers of a full disk, a quota, and the limit of a file's size."""
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""The error numbers of too many open files, of the process and of the system."""

_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})

LoadFailure: TypeAlias = LoadFailed | OutOfSpace | OutOfFiles


def load_failure(model: str, reason: str, cause: BaseException | None) -> LoadFailure:
    """Return the error of a load that failed for a reason, by what has caused it.

    A platform that is told OutOfSpace unloads other models, and tries again (SageMaker, Load Model
    API); OutOfFiles is tried again, and with LoadFailed it gives the model up.
    """
    number = _error_number(cause)
    if number in OUT_OF_FILES:
        return OutOfFiles(model, reason, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return OutOfSpace(model, reason) if number in OUT_OF_SPACE else LoadFailed(model, reason)


def read_failure(model: str, reason: str, cause: BaseException | None) -> LoadFailure:
    """Return the error for unreadable files of a load; missing ones have their own."""
    if _error_number(cause) in _MISSING:
        return FilesMissing(model, reason)
    return load_failure(model, reason, cause)


def store_failure(model: str, reason: str, problem: StoreProblem) -> LoadFailed:
    """Return the error of a load whose store failed: to ask again may help, the model may not be.

    What the store holds is the model's own: an object that is missing, or another one by now.
    """
    return (StoreUnavailable if problem.is_away else LoadFailed)(model, reason)


def _error_number(cause: BaseException | None) -> int:
    """Return the errno at the root of an error, 0 without one."""
    of_system = (error for error in causes(cause) if isinstance(error, OSError))
    return next((error.errno or 0 for error in of_system), 0)


def write_failure(model: str, error: OSError) -> LoadFailure:
    """Return the error of a load whose files cannot be written."""
    reason = error.strerror or str(error)
    is_exhausted = error.errno in OUT_OF_SPACE | OUT_OF_FILES
    return load_failure(
        model, reason if is_exhausted else f"its files cannot be written: {reason}", error
    )
