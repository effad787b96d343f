"""JAX's accelerator packages, by pip extra. Does not import JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Plugin:
    """The packages that a pip extra installs to support one platform."""

    extra: str
    compiles: str
    """The package required to compile for the platform."""
    runs: str
    """The package that JAX needs to find devices of the platform."""

    @property
    def wheels(self) -> Sequence[str]:
        """Return the plugin's packages, without duplicates."""
        return tuple(dict.fromkeys((self.runs, self.compiles)))


PLUGINS: Mapping[str, Sequence[Plugin]] = MappingProxyType(
    {
        "cpu": (),
        "cuda": (
            Plugin("cuda12", "jax-cuda12-pjrt", "jax-cuda12-plugin"),
            Plugin("cuda13", "jax-cuda13-pjrt", "jax-cuda13-plugin"),
        ),
        "tpu": (Plugin("tpu", "libtpu", "libtpu"),),
    }
)
"""Plugins by platform; the first is preferred for a new installation."""


@cache
def version(name: str) -> str:
    """Return the installed version of a package, or an empty string. Cached.

    A look-up takes a millisecond, and every program needs it for its cache key.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def versions(platform: str) -> Mapping[str, str]:
    """Return the installed versions of a platform's packages, by package name."""
    names = [name for plugin in PLUGINS.get(platform, ()) for name in plugin.wheels]
    return {name: found for name in names if (found := version(name))}


def chosen(platform: str) -> Plugin | None:
    """Return the first plugin with an installed package, else the platform's first, or None."""
    plugins = PLUGINS.get(platform, ())
    there = (plugin for plugin in plugins if any(map(version, plugin.wheels)))
    return next(there, plugins[0] if plugins else None)


def missing(platform: str, *, compiles: bool = False) -> str:
    """Return which package is missing for a platform and how to install it, or an empty string.

    With `compiles` this checks the packages that compile for the platform, otherwise those that run
    on it.
    """
    names = {
        plugin.extra: plugin.compiles if compiles else plugin.runs
        for plugin in PLUGINS.get(platform, ())
    }
    plugin = chosen(platform)
    if plugin is None or any(map(version, names.values())):
        return ""
    return f"{names[plugin.extra]} is not installed: pip install '{requirement(plugin)}'"


def requirement(plugin: Plugin) -> str:
    """Return the pip requirement that installs a plugin."""
    return f"xlaserve[{plugin.extra}]"
