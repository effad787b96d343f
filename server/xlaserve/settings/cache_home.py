"""The default directories of caches."""

from pathlib import Path

from xlaserve.errors import InvalidSettings


def cache_home(name: str, setting: str) -> Path:
    """Return a cache directory in the user's home directory.

    Raises InvalidSettings if the user has no home: HOME is not set and the user is not in the
    password database, as may be the case in a container.
    """
    try:
        return Path.home() / ".cache" / name
    except RuntimeError:
        expected = "a directory, since the server's user has no home (HOME is not set)"
        raise InvalidSettings(setting, expected, "auto") from None
