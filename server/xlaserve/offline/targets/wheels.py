"""Checks whether the wheels that compile for a target are installed. Imports none of them."""

from collections.abc import Mapping

from xlaserve.errors import DeviceUnavailable
from xlaserve.runtime.devices import plugins
from xlaserve.runtime.devices.target_kinds import Target


def check(target: Target) -> None:
    """Raise DeviceUnavailable where a wheel is missing that compiles for a target."""
    if missing := plugins.missing(target.platform, compiles=True):
        raise DeviceUnavailable(target.name, missing)


def versions(platform: str) -> Mapping[str, str]:
    """Return the versions of the packages that compile for a platform, by name."""
    compilers = {plugin.compiles for plugin in plugins.PLUGINS.get(platform, ())}
    jax = {name: version for name in ("jax", "jaxlib") if (version := plugins.version(name))}
    return jax | {
        name: version for name, version in plugins.versions(platform).items() if name in compilers
    }
