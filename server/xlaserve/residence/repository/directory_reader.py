"""Reads a model's directory: its configuration, its labels and its versions.

Everything here waits for the disk and is called from a thread, never from the event loop.
"""

import os
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
"""The most bytes of the files of labels of a model."""
MAX_LABELS = 1 << 18
"""Limit of label lines: each is an object as long as the model is loaded."""
MAX_LABEL_LENGTH = 1024
"""The most bytes of a label, which one answer may repeat for each row of a batch."""

ENSEMBLE_VERSION = 1
"""The version of an ensemble without version directories: it needs no files."""


UNVERSIONED = 1
"""The version of a directory without versions."""

_FORBIDDEN_ROOTS = tuple(map(Path, ("/dev", "/proc", "/sys")))
"""Directories without models, whatever the allowed roots are."""


class DirectoryReader:
    """Reads directories of models, which lie where the roots allow, wherever links lead."""

    def __init__(self, root: Path, roots: Roots, max_config_bytes: int) -> None:
        """Relative paths are below `root`."""
        self._root = root
        self._roots = roots
        self._max_config_bytes = max_config_bytes

    def confine_url(self, url: str) -> Path:
        """Return the path of a url; the error for a forbidden one reveals nothing."""
        if not url.startswith("/") or "\0" in url:
            raise InvalidModel(f"its url is not an absolute path: '{url}'")
        resolved = Path(url).resolve()
        for path in (by_text(url), resolved):
            if any(lies_in(path, root) for root in _FORBIDDEN_ROOTS):
                raise InvalidModel(f"its url leads into a file system of the kernel: '{url}'")
        return self._roots.confine(resolved, url)

    def existing(self, text: str) -> Path:
        """Return the resolved path; raises InvalidModel if it does not exist."""
        if not text or "\0" in text:
            raise InvalidModel("its path is empty" if not text else "its path holds a NUL")
        # Of what lies outside nothing is said, not even whether it is there. What is below the
        # root is the text itself where that is absolute.
        path = self._roots.confine(self._root / text, text)
        if not path.exists():
            raise InvalidModel(f"there is nothing at '{text}'")
        return path

    def config_at(self, path: Path, schema: str) -> ModelConfig:
        """Return the configuration at a path, with the inputs and outputs of a schema."""
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
        """Return the versions of a model directory, or the path itself as one."""
        if path.is_dir():
            versions = self.versions(path, config, sent=False)
            if versions:
                return versions
        return (self._version(UNVERSIONED, path, config, path, sent=False),)

    def config(self, name: str, directory: Path, text: str | None) -> ModelConfig:
        """Return the configuration of a model, or that of a text; raises InvalidModel."""
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
        """Return a configuration with the labels of its outputs, read from their files.

        Where a client wrote it (`sent`), or whoever made an archive, they lie in the directory
        of the model. A file is read once, however many outputs name it. Raises InvalidModel for
        one that is not there, or leads out, and for files that are too large together.
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
        return replace(config, labels=MappingProxyType(labels)) if labels else config

    def versions(
        self, directory: Path, config: ModelConfig, *, sent: bool
    ) -> tuple[VersionSource, ...]:
        """Return the versions picked by the policy, which must keep uploaded ones."""
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
            # What is no link lies where its directory does: to resolve it costs 50 us.
            if os.path.islink(file):  # noqa: PTH114, in a quarter of the time
                roots.confine(file)
        found = fingerprint_of(directory, listed)
        mark = (str(directory), config, found, content_of(listed))
        return VersionSource(number, directory, mark, roots, home, sent=sent)


def check_own_files(config: ModelConfig) -> None:
    """Raise InvalidModel where a configuration names a file outside of its model's directory.

    For one that a client sent, or that came with an archive: who writes the configuration of a
    repository may also name files of other directories, within the roots.
    """
    for field, name in named_files(config.message) if config.message else ():
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise InvalidModel(
                f"{field}: expected a file in the directory of the model, got "
                f"{shown(name)}; only the configuration in a repository may name others"
            )


def _lines(data: bytes, most: int) -> tuple[bytes, ...]:
    """Return the lines of a file; raises InvalidModel for too many, before they are split."""
    count = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n") + 1
    if count > most:
        raise InvalidModel(
            f"expected at most {MAX_LABELS} lines of labels of a model, {most} of them here, got "
            f"{count}"
        )
    lines = tuple(data.splitlines())
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LABEL_LENGTH:
            raise InvalidModel(
                f"expected a label of at most {MAX_LABEL_LENGTH} bytes on each line, got "
                f"{len(line)} bytes on line {number}"
            )
    return lines
