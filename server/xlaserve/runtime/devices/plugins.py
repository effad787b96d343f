"""JAX's accelerator wheels, by extra. Needs no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Plugin:
    """The plugin packages of one extra for a platform."""

    extra: str
    compiles: str
    """The wheel required to compile for the platform."""
    runs: str
    """The wheel without which JAX finds no device of it."""

    @property
    def wheels(self) -> Sequence[str]:
        """Return its wheels, each once."""
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
"""Plugins by platform, the preferred one for a new installation first."""


@cache
def version(name: str) -> str:
    """Return the version of a package, empty where it is not installed.

    To find one takes a millisecond, and each program asks.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def versions(platform: str) -> Mapping[str, str]:
    """Return the installed versions of a platform's wheels, by name."""
    names = [name for plugin in PLUGINS.get(platform, ()) for name in plugin.wheels]
    return {name: found for name in names if (found := version(name))}


def chosen(platform: str) -> Plugin | None:
    """Return a partly installed plugin of a platform, else the first, or None."""
    plugins = PLUGINS.get(platform, ())
    there = (plugin for plugin in plugins if any(map(version, plugin.wheels)))
    return next(there, plugins[0] if plugins else None)


def missing(platform: str, *, compiles: bool = False) -> str:
    """Return the wheel that is missing on a platform, and how to install it; empty if none is.

    `compiles`: of those that compile for it; else of those that run on it.
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
    """Return the requirement for pip."""
    return f"xlaserve[{plugin.extra}]"
