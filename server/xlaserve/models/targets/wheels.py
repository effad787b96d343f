"""Which wheels a target takes, and their versions. Needs no JAX, and imports none of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType

from xlaserve.errors import DeviceUnavailable
from xlaserve.models.targets.kinds import Target


@dataclass(frozen=True, slots=True)
class _Wheels:
    extra: str
    """Extra of this package, which asks for them."""
    any_of: tuple[str, ...]
    """One of these has to be installed."""


_WHEELS: Mapping[str, _Wheels] = MappingProxyType(
    {
        "cuda": _Wheels("cuda12", ("jax-cuda12-pjrt", "jax-cuda13-pjrt")),
        "tpu": _Wheels("tpu", ("libtpu",)),
    }
)
"""Wheels by platform; the CPU takes none."""

_JAX = ("jax", "jaxlib")


def check(target: Target) -> None:
    """Raise DeviceUnavailable where a wheel is missing that compiles for a target."""
    wanted = _WHEELS.get(target.platform)
    if wanted is not None and not any(map(_version, wanted.any_of)):
        raise DeviceUnavailable(
            target.name,
            f"{wanted.any_of[0]} is not installed, without which nothing is compiled for it: "
            f"pip install 'xlaserve[{wanted.extra}]'",
        )


def versions(platform: str) -> Mapping[str, str]:
    """Return the version of everything that compiles for a platform, by its name."""
    wanted = _WHEELS.get(platform)
    names = (*_JAX, *(wanted.any_of if wanted else ()))
    return {name: version for name in names if (version := _version(name))}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
