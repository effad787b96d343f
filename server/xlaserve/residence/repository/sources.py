"""Descriptions of what to load: configuration, versions, and where their files are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config import checksums
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.repository.fingerprints import Fingerprint
from xlaserve.storage.cache import Lease
from xlaserve.storage.fetching import FetchControl


@dataclass(frozen=True, slots=True)
class Location:
    """A model outside the repository, as specified by a mesh."""

    path: str
    """Path of a version directory, a model directory, or a single file."""
    schema: str = ""
    """Path of a file with `inputs` and `outputs` as in ModelMetadata; empty if there is none."""


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """The files of a version in an object store."""

    url: str
    """URL of the model."""
    take: Callable[[FetchControl], Lease]
    """Fetches the files of this version, and returns the local model directory; blocks."""
    control: Callable[[], FetchControl]
    """Creates the limits for a fetch that starts now."""


@dataclass(frozen=True, slots=True)
class VersionSource:
    """One version that can be loaded."""

    number: int
    directory: Path
    """The version directory, or the file of a single-file model."""
    fingerprint: Fingerprint
    roots: Roots = ANYWHERE
    """Directories that the files must be in, also after following links."""
    home: Path = Path()
    """The model's directory, against which paths in its configuration are resolved."""
    sent: bool = False
    """Whether a client sent the files with the load request."""
    remote: "RemoteFiles | None" = None
    """The store to fetch the files from; None if they are local. Until they are fetched,
    `directory` has only the headers needed to predict sizes."""

    def verify(self, config: ModelConfig, check_cancelled: Callable[[], None]) -> None:
        """Check the files against the checksums in the configuration; raises InvalidModel.

        Reads every file completely.
        """
        roots = Roots.of((self.home,)) if self.sent else self.roots
        checksums.verify(self.home, config.checksums, roots, check_cancelled)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded: its configuration, and the versions selected by its policy."""

    name: str
    config: ModelConfig
    versions: tuple[VersionSource, ...]
