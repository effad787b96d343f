"""Diagnoses a root without models, and suggests the directory probably meant."""

import os
from pathlib import Path

from xlaserve.artifact.manifest import ARTIFACT, FILE_NAME
from xlaserve.artifact.onnx_source import SUFFIXES
from xlaserve.errors import InvalidSettings
from xlaserve.residence.repository.listing import Listing, is_model, subdirectories
from xlaserve.residence.repository.names import is_version
from xlaserve.settings import Settings
from xlaserve.storage.urls import check_url, url_of

_LAYOUT = "expected MODEL/VERSION/, as `xlaserve export` and `xlaserve import` write it"
_ARTIFACT_SUFFIX = Path(ARTIFACT).suffix
_MAX_LOOKED_INTO = 100
"""Maximum number of directories searched for models one level below."""


def check_roots(settings: Settings) -> None:
    """Raise InvalidSettings unless the repositories are distinct directories or URLs."""
    given = {"repository": [settings.repository], "model_repository": settings.model_repository}
    for root in settings.model_root:
        if url_of(root):
            raise InvalidSettings(
                "model_root", "a directory instead of a URL", url_of(root).split("//")[0]
            )
    seen: set[str] = set()
    for setting, paths in given.items():
        for path in paths:
            if url := url_of(path):
                check_url(setting, url, settings.remote_schemes)
                if url in seen:
                    raise InvalidSettings(setting, "a URL not already given", url)
                seen.add(url)
                continue
            # SageMaker creates the directory with the first model.
            if not os.path.isdir(path) and not settings.sagemaker_multi_model:  # noqa: PTH112
                raise InvalidSettings(setting, "a directory", str(path))
            if os.path.realpath(path) in seen:
                raise InvalidSettings(setting, "a directory not already given", str(path))
            seen.add(os.path.realpath(path))


def hint(root: Path, listing: Listing) -> str:
    """Suggest which directory to serve instead; empty if the root seems to have a model."""
    root = root.absolute()
    directories = [root / name for name in listing.models]
    try:
        return "" if any(map(is_model, directories)) else _hint(root, listing, directories)
    except OSError:  # an unreadable directory may be a model
        return ""


def _hint(root: Path, listing: Listing, directories: list[Path]) -> str:
    if (root / FILE_NAME).is_file():
        model = root.parent if is_version(root.name) else None
        instead = f"serve '{model.parent}'" if model else "move it to MODEL/VERSION/"
        return f"it looks like a version of a model: {instead}"
    if is_model(root):
        return f"it looks like a model: serve its parent '{root.parent}'"
    for directory in directories[:_MAX_LOOKED_INTO]:
        if any(map(is_model, subdirectories(directory))):
            return f"its directory '{directory.name}' contains models: serve '{directory}'"
    for name in sorted(listing.skipped):
        if name.endswith(SUFFIXES):
            file, stem = root / name, Path(name).stem
            return f"'{name}' must be converted first: xlaserve import {file} {root / stem}"
        if name.endswith(_ARTIFACT_SUFFIX):
            return f"'{name}' is a model in one file: {_LAYOUT}; move it to MODEL/VERSION/"
    return f"{'none of its directories has a version' if directories else 'it is empty'}: {_LAYOUT}"
