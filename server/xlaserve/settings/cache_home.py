"""The default directories of caches."""

from pathlib import Path

from xlaserve.errors import InvalidSettings


def cache_home(name: str, setting: str) -> Path:
    """Return the directory of a cache in the home of the user.

    Raises InvalidSettings for a user that has none: one without an entry in the list of users, as a
    container may run as, while HOME is not set.
    """
    try:
        return Path.home() / ".cache" / name
    except RuntimeError:
        expected = "a directory, since the server's user has no home (HOME is not set)"
        raise InvalidSettings(setting, expected, "auto") from None
