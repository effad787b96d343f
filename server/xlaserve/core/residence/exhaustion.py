"""Which failures of a load are a lack of disk, of files or of quota, and no fault of the model."""

import errno

from xlaserve.errors import LoadFailed, OutOfSpace

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})
"""The error numbers of a full disk, a quota, a limit of the process, and too many open files."""


def load_failure(model: str, reason: str, cause: BaseException | None) -> LoadFailed | OutOfSpace:
    """Return the error of a load that failed for a reason, by what has caused it.

    A platform that is told OutOfSpace unloads other models, and tries again (SageMaker, Load Model
    API); with LoadFailed it gives the model up.
    """
    if isinstance(cause, OSError) and cause.errno in OUT_OF_SPACE:
        return OutOfSpace(model, reason)
    return LoadFailed(model, reason)


def write_failure(model: str, error: OSError) -> LoadFailed | OutOfSpace:
    """Return the error of a load whose files cannot be written."""
    reason = error.strerror or str(error)
    return load_failure(
        model,
        reason if error.errno in OUT_OF_SPACE else f"its files cannot be written: {reason}",
        error,
    )
