"""Reads a model's directory: its configuration, its labels and its versions.

All functions block on disk I/O and run in threads, never on the event loop.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import Roots, by_text, lies_in
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.fields import named_files
from xlaserve.model_config.schema import shown
from xlaserve.model_config.text import parse_json, read_config
from xlaserve.residence.repository.fingerprints import content_of, files_below, fingerprint_of
from xlaserve.residence.repository.listing import is_version_directory
from xlaserve.residence.repository.names import is_version
from xlaserve.residence.repository.sources import VersionSource

MAX_LABEL_BYTES = 16 << 20
"""Maximum size of all label files of a model together."""
MAX_LABELS = 1 << 18
"""Maximum number of label lines: each line is a Python object for as long as the model is
loaded."""
MAX_LABEL_LENGTH = 1024
"""Maximum bytes of a label; an answer may repeat a label for each row."""

ENSEMBLE_VERSION = 1
"""The version number of an ensemble without version directories, which needs no files."""


UNVERSIONED = 1
"""The version number of a model directory without version directories."""

_FORBIDDEN_ROOTS = tuple(map(Path, ("/dev", "/proc", "/sys")))
"""Directories that never hold models, whatever the allowed roots are."""


class DirectoryReader:
    """Reads model directories, and rejects files outside the allowed roots, also through links."""

    def __init__(self, root: Path, roots: Roots, max_config_bytes: int) -> None:
        """Relative paths are below `root`."""
        self._root = root
        self._roots = roots
        self._max_config_bytes = max_config_bytes

    def confine_url(self, url: str) -> Path:
        """Return the path of a URL; errors do not reveal whether a forbidden path exists."""
        if not url.startswith("/") or "\0" in url:
            raise InvalidModel(f"its url is not an absolute path: '{url}'")
        resolved = Path(url).resolve()
        for path in (by_text(url), resolved):
            if any(lies_in(path, root) for root in _FORBIDDEN_ROOTS):
                raise InvalidModel(f"its url points into a kernel file system: '{url}'")
        return self._roots.confine(resolved, url)

    def existing(self, text: str) -> Path:
        """Return the resolved path; raises InvalidModel if it does not exist."""
        if not text or "\0" in text:
            raise InvalidModel("its path is empty" if not text else "its path contains a NUL")
        # For a path outside the roots, the error must not even reveal whether it exists. If `text`
        # is absolute, the join ignores the root.
        path = self._roots.confine(self._root / text, text)
        if not path.exists():
            raise InvalidModel(f"nothing found at '{text}'")
        return path

    def config_at(self, path: Path, schema: str) -> ModelConfig:
        """Return the configuration in a directory; a schema file replaces inputs and outputs."""
        config = ModelConfig()
        if path.is_dir():
            config = self._read(path)
            check_own_files(config)
            config = self.labelled(path, config, sent=True)
        if not schema:
            return config
        file, limit = self.existing(schema), self._max_config_bytes
        data = files.read_checked(file.parent, file.name, limit_bytes=limit, roots=self._roots)
        given = parse_json(bytes(data), limit_bytes=limit)
        return replace(config, inputs=given.inputs, outputs=given.outputs)

    def versions_at(self, path: Path, config: ModelConfig) -> tuple[VersionSource, ...]:
        """Return the versions in a model directory, or the path itself as the only version."""
        if path.is_dir():
            versions = self.versions(path, config, sent=False)
            if versions:
                return versions
        return (self._version(UNVERSIONED, path, config, path, sent=False),)

    def config(self, name: str, directory: Path, text: str | None) -> ModelConfig:
        """Return the configuration from a model's directory or from `text`; raises InvalidModel."""
        config = (
            self._read(directory)
            if text is None
            else parse_json(text, limit_bytes=self._max_config_bytes)
        )
        config.check_name(name)
        if text is not None:
            check_own_files(config)
        return config

    def _read(self, directory: Path) -> ModelConfig:
        return read_config(directory, limit_bytes=self._max_config_bytes, roots=self._roots)

    def labelled(self, directory: Path, config: ModelConfig, *, sent: bool = False) -> ModelConfig:
        """Return the configuration with the labels of its outputs, read from their files.

        If a client or an archive supplied the configuration (`sent`), the label files must be in
        the model's directory. A file named by several outputs is read once. Raises InvalidModel for
        a file that is missing or outside the roots, and if the files are too large together.
        """
        roots, labels = self._roots_of(directory, sent=sent), {}
        found: dict[str, tuple[bytes, ...]] = {}
        left_bytes, left = MAX_LABEL_BYTES, MAX_LABELS
        for output in config.message.output if config.message else ():
            if name := output.label_filename:
                try:
                    if name not in found:
                        data = files.read_checked(
                            directory, name, limit_bytes=left_bytes, roots=roots
                        )
                        found[name] = _lines(bytes(data), left)
                        left_bytes, left = left_bytes - len(data), left - len(found[name])
                    labels[output.name] = found[name]
                except InvalidModel as error:
                    raise InvalidModel(
                        f"label_filename of output '{output.name}': {error}"
                    ) from error
        if not labels:
            return config
        size = sum(map(_memory_of, found.values()))
        return replace(config, labels=MappingProxyType(labels), labels_bytes=size)

    def versions(
        self, directory: Path, config: ModelConfig, *, sent: bool
    ) -> tuple[VersionSource, ...]:
        """Return the versions selected by the policy. With `sent`, files must be inside them."""
        found = {
            int(path.name): path
            for path in directory.iterdir()
            if is_version(path.name) and is_version_directory(path)
        }
        if config.is_ensemble and not found:
            found = {ENSEMBLE_VERSION: directory}
        chosen = config.version_policy.select(found)
        return tuple(
            self._version(number, found[number], config, directory, sent=sent) for number in chosen
        )

    def _roots_of(self, directory: Path, *, sent: bool) -> Roots:
        return Roots.of((directory,)) if sent else self._roots

    def _version(
        self, number: int, path: Path, config: ModelConfig, home: Path, *, sent: bool
    ) -> VersionSource:
        roots = self._roots_of(path, sent=sent)
        directory = path if sent else roots.confine(path)
        listed = files_below(directory)
        for file in listed:
            # Only links can lead outside; resolving every file would cost 50 us each.
            if os.path.islink(file):  # noqa: PTH114, in a quarter of the time
                roots.confine(file)
        found = fingerprint_of(directory, listed)
        mark = (str(directory), config, found, content_of(listed))
        return VersionSource(number, directory, mark, roots, home, sent=sent)


def check_own_files(config: ModelConfig) -> None:
    """Raise InvalidModel if a configuration names a file outside its model's directory.

    Applies to configurations sent by clients or taken from archives. The configuration in a
    repository may name other files within the roots.
    """
    for field, name in named_files(config.message) if config.message else ():
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise InvalidModel(
                f"{field}: expected a file in the directory of the model, got "
                f"{shown(name)}; only configurations in a repository may name other files"
            )


def _memory_of(lines: tuple[bytes, ...]) -> int:
    return sys.getsizeof(lines) + sum(map(sys.getsizeof, lines))


def _lines(data: bytes, most: int) -> tuple[bytes, ...]:
    """Split a file into lines; raises InvalidModel if there are too many, before splitting."""
    count = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n") + 1
    if count > most:
        raise InvalidModel(
            f"expected at most {most} lines in the label file ({MAX_LABELS} per model), got {count}"
        )
    lines = tuple(data.splitlines())
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LABEL_LENGTH:
            raise InvalidModel(
                f"expected a label of at most {MAX_LABEL_LENGTH} bytes on each line, got "
                f"{len(line)} bytes on line {number}"
            )
    return lines
