"""Finds pretrained models in installed packages, without running package code."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path

from xlaserve.cli.importing.packaged_models import PACKAGED
from xlaserve.errors import InvalidRequest

_MODELS = (".onnx", ".pt2")
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A model file in a package."""

    name: str
    file: Path
    options: Sequence[str] = ()
    """Options that `xlaserve import` needs for this file."""
    notice: str = ""
    """A note for the user; may be empty."""


def find(name: str) -> PackagedFile:
    """Return the file of a known model, of a PACKAGE, or at PACKAGE/PATH.

    Raises InvalidRequest that tells what to install, or which files exist.
    """
    known = PACKAGED.get(name)
    if known is None:
        return _in_package(*name.split("/", 1))
    package, _, version = known.package.partition("==")
    installed = _distribution(package, f"pip install {known.package}")
    file = _located(installed, known.path)
    if file is None:
        raise InvalidRequest(
            f"pkg:{name}: {package} {installed.version} contains no {known.path}: "
            f"pip install {known.package}"
        )
    other = f"{package} {installed.version} is installed, {version} was tried"
    notice = "" if installed.version == version else other
    return PackagedFile(name, file, shlex.split(known.options), notice)


def _in_package(package: str, path: str = "") -> PackagedFile:
    near = get_close_matches(package, PACKAGED, n=1, cutoff=0.7)
    hint = f"; did you mean pkg:{near[0]}?" if near else ""
    installed = _distribution(package, f"expected an installed package{hint}")
    files = sorted(str(each) for each in installed.files or () if each.suffix in _MODELS)
    wanted = [each for each in files if path in ("", each) or each.endswith(f"/{path}")]
    if len(wanted) == 1 and (file := _located(installed, wanted[0])) is not None:
        return PackagedFile(file.stem, file)
    if not files:
        raise InvalidRequest(f"pkg:{package}: contains no model file ({', '.join(_MODELS)})")
    more = ", ..." if len(files) > _MOST_SHOWN else ""
    raise InvalidRequest(
        f"pkg:{package}: expected {package}/FILE of one of {', '.join(files[:_MOST_SHOWN])}{more}"
        + (f", got '{path}'" if path else "")
    )


def _distribution(package: str, hint: str) -> metadata.Distribution:
    try:
        return metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise InvalidRequest(f"pkg:{package}: not installed: {hint}") from error


def _located(installed: metadata.Distribution, path: str) -> Path | None:
    file = Path(str(installed.locate_file(path)))
    return file if file.is_file() else None
