"""Load failures caused by a full disk, a quota or too many open files."""

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
"""errno of a full disk, an exhausted quota, and a file over the size limit."""
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""errno of too many open files, in the process or in the system."""

_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})

LoadFailure: TypeAlias = LoadFailed | OutOfSpace | OutOfFiles


def load_failure(model: str, reason: str, cause: BaseException | None) -> LoadFailure:
    """Return the exception for a failed load, depending on its cause.

    SageMaker unloads other models after OutOfSpace and tries again (Load Model API). It also
    retries after OutOfFiles, but gives up after LoadFailed.
    """
    number = _error_number(cause)
    if number in OUT_OF_FILES:
        return OutOfFiles(model, reason, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return OutOfSpace(model, reason) if number in OUT_OF_SPACE else LoadFailed(model, reason)


def read_failure(model: str, reason: str, cause: BaseException | None) -> LoadFailure:
    """Return the exception for a load whose files are missing or unreadable."""
    if _error_number(cause) in _MISSING:
        return FilesMissing(model, reason)
    return load_failure(model, reason, cause)


def store_failure(model: str, reason: str, problem: StoreProblem) -> LoadFailed:
    """Return the exception for a load that failed because of its object store.

    StoreUnavailable tells the caller to retry. LoadFailed means that the model's objects are
    missing or changed.
    """
    return (StoreUnavailable if problem.is_away else LoadFailed)(model, reason)


def _error_number(cause: BaseException | None) -> int:
    """Return the errno of the first OSError in the chain of causes, or 0."""
    of_system = (error for error in causes(cause) if isinstance(error, OSError))
    return next((error.errno or 0 for error in of_system), 0)


def write_failure(model: str, error: OSError) -> LoadFailure:
    """Return the exception for a load whose files cannot be written."""
    reason = error.strerror or str(error)
    is_exhausted = error.errno in OUT_OF_SPACE | OUT_OF_FILES
    return load_failure(
        model, reason if is_exhausted else f"its files cannot be written: {reason}", error
    )
