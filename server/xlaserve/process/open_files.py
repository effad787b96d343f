"""Raises the limit of open files to the number that the settings may need."""

import resource

import structlog

from xlaserve.settings import Settings

_OTHER_FILES = 1024
"""Files of models, of Python models' processes, of logs and of libraries."""

_log = structlog.get_logger("server")


def wanted_files(settings: Settings) -> int:
    """Return the number of open files that these settings may need."""
    return (
        settings.max_connections
        + settings.max_http_connections
        + settings.max_shared_memory_regions
        + _OTHER_FILES
    )


def raise_open_files(settings: Settings) -> None:
    """Raise the open-file limit to cover all connections and memory regions.

    Beyond the hard limit nobody can raise it: then the log says so, with both numbers. Where there
    are no more files, connections wait to be accepted, and loads are refused.
    """
    wanted = wanted_files(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    except (OSError, ValueError):
        allowed = soft  # some sandboxes let nobody change it
    if allowed < wanted:
        _log.warning(
            "open files are limited to fewer than the settings may need",
            allowed=max(soft, allowed),
            wanted=wanted,
            settings="max_connections, max_http_connections, max_shared_memory_regions",
        )
