"""Raises the limit of open files as far as the settings may need."""

import resource

import structlog

from xlaserve.settings import Settings

_OTHER_FILES = 1024
"""Allowance for files of models, Python models' processes, logs and libraries."""

_log = structlog.get_logger("server")


def wanted_files(settings: Settings) -> int:
    """Return the maximum number of files that these settings may open."""
    return (
        settings.max_connections
        + settings.max_http_connections
        + settings.max_shared_memory_regions
        + _OTHER_FILES
    )


def raise_open_files(settings: Settings) -> None:
    """Raise the soft limit of open files to cover all connections and shared-memory regions.

    If the hard limit is too low, a warning is logged. When descriptors run out, connections wait in
    the accept queue, and loads are refused.
    """
    wanted = wanted_files(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    except (OSError, ValueError):
        allowed = soft  # some sandboxes forbid any change
    if allowed < wanted:
        _log.warning(
            "open file limit below the needs of the settings",
            allowed=max(soft, allowed),
            wanted=wanted,
            settings="max_connections, max_http_connections, max_shared_memory_regions",
        )
