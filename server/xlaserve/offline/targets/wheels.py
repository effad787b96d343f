"""Checks whether a target's compiler packages are installed, without importing them."""

from collections.abc import Mapping

from xlaserve.errors import DeviceUnavailable
from xlaserve.runtime.devices import plugins
from xlaserve.runtime.devices.target_kinds import Target


def check(target: Target) -> None:
    """Raise DeviceUnavailable if a wheel that compiles for the target is missing."""
    if missing := plugins.missing(target.platform, compiles=True):
        raise DeviceUnavailable(target.name, missing)


def versions(platform: str) -> Mapping[str, str]:
    """Return the versions of the packages that compile for a platform, by name."""
    compilers = {plugin.compiles for plugin in plugins.PLUGINS.get(platform, ())}
    jax = {name: version for name in ("jax", "jaxlib") if (version := plugins.version(name))}
    return jax | {
        name: version for name, version in plugins.versions(platform).items() if name in compilers
    }
