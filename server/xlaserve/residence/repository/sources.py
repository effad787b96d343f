"""The sources of a load: a model's configuration, its versions, and where their files are."""

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
    """A model outside the repository, as a mesh names it."""

    path: str
    """A version directory, a model directory, or a single file."""
    schema: str = ""
    """A file with `inputs` and `outputs` as in ModelMetadata; empty for none."""


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """The files of a version in a store."""

    url: str
    """The model's."""
    take: Callable[[FetchControl], Lease]
    """Returns the model's directory with the files of this version, fetched; blocks."""
    control: Callable[[], FetchControl]
    """Makes the limits of a fetch that starts now."""


@dataclass(frozen=True, slots=True)
class VersionSource:
    """One version that can be loaded."""

    number: int
    directory: Path
    """The version directory, or the file of a single-file model."""
    fingerprint: Fingerprint
    roots: Roots = ANYWHERE
    """Directories that confine its files, also through links."""
    home: Path = Path()
    """The model's directory, base of paths in its configuration."""
    sent: bool = False
    """Whether its files came with a request, and not from the operator's disk."""
    remote: "RemoteFiles | None" = None
    """The store that its files are fetched from; None where they are there. Until they are, the
    directory holds only what sizes are predicted from."""

    def verify(self, config: ModelConfig, check_cancelled: Callable[[], None]) -> None:
        """Return if the files have the checksums of the configuration; raises InvalidModel.

        Reads each of them to its end.
        """
        roots = Roots.of((self.home,)) if self.sent else self.roots
        checksums.verify(self.home, config.checksums, roots, check_cancelled)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model that can be loaded: its configuration and the versions that its policy picks."""

    name: str
    config: ModelConfig
    versions: tuple[VersionSource, ...]
