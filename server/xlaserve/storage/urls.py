"""URLs of model repositories: validation, and their representation as paths."""

import importlib.util
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from xlaserve.errors import InvalidSettings

SETTING = "remote_schemes"

_HELD = re.compile(r"([a-z][a-z0-9+.-]*):/(?!/)(.+)", re.DOTALL)

EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "s3": ("remote-s3", ("fsspec", "s3fs")),
        "gs": ("remote-gs", ("fsspec", "gcsfs")),
        "az": ("remote-az", ("fsspec", "adlfs")),
        "hf": ("remote-hf", ("fsspec", "huggingface_hub")),
        "http": ("", ()),
        "https": ("", ()),
    }
)
"""Scheme -> the pip extra of this package that supports it, and the modules it installs."""


def url_of(path: Path) -> str:
    """Return the URL in a path, or an empty string for a local path.

    Settings contain `s3://bucket/models` as a Path, which collapses the two slashes.
    """
    found = _HELD.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else ""


def check_url(setting: str, url: str, allowed: Collection[str]) -> None:
    """Raise InvalidSettings unless the URL is allowed and its packages are installed."""
    parts = urlsplit(url)
    shown = f"{parts.scheme}://..."
    if "@" in parts.netloc:
        # Do not show the rejected URL: it may contain a password.
        raise InvalidSettings(
            setting, "a URL without credentials: the SDK reads them from its environment", shown
        )
    if parts.query or parts.fragment:
        raise InvalidSettings(setting, "a URL without a query, which may hold a signature", shown)
    if parts.scheme not in EXTRAS:
        known = ", ".join(f"{scheme}://" for scheme in EXTRAS)
        raise InvalidSettings(setting, f"a directory or a URL with one of {known}", url[:200])
    if not parts.netloc:
        raise InvalidSettings(setting, "a URL with a bucket or a host", url[:200])
    if {".", "..", ""} & set(parts.path.strip("/").split("/")) and parts.path.strip("/"):
        raise InvalidSettings(setting, "a URL without '..' or empty parts in its path", url[:200])
    if parts.scheme not in allowed:
        raise InvalidSettings(SETTING, f"{parts.scheme} among them, for {url[:200]}", list(allowed))
    extra, modules = EXTRAS[parts.scheme]
    if any(importlib.util.find_spec(module) is None for module in modules):
        expected = f"the extra of {parts.scheme}://, `pip install 'xlaserve[{extra}]'`"
        raise InvalidSettings(setting, expected, url[:200])
