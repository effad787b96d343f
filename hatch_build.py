"""Puts the commit of the source tree into what is built, so that each build says which it is."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PLACES = {"wheel": "xlaserve", "sdist": "server/xlaserve"}


class CommitHook(BuildHookInterface):
    """Adds a file with the commit to a wheel or a source distribution."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file, where the commit is known."""
        package = Path(self.root) / "server" / "xlaserve"
        spec = importlib.util.spec_from_file_location("xlaserve_build", package / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        # An editable one lies in its checkout, which says it.
        if version == "editable" or (package / build.COMMIT_FILE).exists():
            return
        if commit := build.commit_of(Path(self.root)):
            self._folder = tempfile.TemporaryDirectory()
            path = Path(self._folder.name) / build.COMMIT_FILE
            path.write_text(f"{commit}\n")
            place = f"{_PLACES[self.target_name]}/{build.COMMIT_FILE}"
            build_data["force_include"][str(path)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file: it is in what was built."""
        if self._folder is not None:
            self._folder.cleanup()
