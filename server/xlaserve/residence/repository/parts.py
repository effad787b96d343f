"""One of the roots of the model repository: a directory or an object store."""

from pathlib import Path
from typing import Protocol

from xlaserve.residence.repository.fingerprints import Fingerprint
from xlaserve.residence.repository.listing import Listing
from xlaserve.residence.repository.sources import ModelSource


class Part(Protocol):
    """One of several repositories, listed and watched separately."""

    @property
    def root(self) -> Path:
        """Return the directory, or the URL in the form of a path."""
        ...

    @property
    def place(self) -> str:
        """Return the directory or URL, as shown in the log."""
        ...

    def listing(self) -> Listing:
        """List the entries; raises OSError unless all could be read."""
        ...

    def fingerprint(self, name: str) -> Fingerprint:
        """Return a fingerprint of a model's files."""
        ...

    def hint(self, listing: Listing) -> str:
        """Return a hint about another root if this root has no models."""
        ...

    def is_holder(self, name: str) -> bool:
        """Tell whether this part has the model."""
        ...

    def directory(self, name: str) -> str:
        """Return the directory or URL of a model, whether or not it exists."""
        ...

    def find_own(self, name: str, config_text: str | None) -> ModelSource:
        """Return the configuration and versions of a model. Raises ModelNotFound or LoadFailed."""
        ...

    def remove_leftovers(self) -> int:
        """Remove leftovers of killed processes, and return their number."""
        ...
