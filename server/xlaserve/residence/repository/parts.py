"""A part of the model repository: a directory, or a place in a store."""

from pathlib import Path
from typing import Protocol

from xlaserve.residence.repository.fingerprints import Fingerprint
from xlaserve.residence.repository.listing import Listing
from xlaserve.residence.repository.sources import ModelSource


class Part(Protocol):
    """One of several repositories, listed and watched separately."""

    @property
    def root(self) -> Path:
        """Return the directory, or the path that holds the URL."""
        ...

    @property
    def place(self) -> str:
        """Return the directory or the URL, as a log names it."""
        ...

    def listing(self) -> Listing:
        """Return its entries; raises OSError unless all could be read."""
        ...

    def fingerprint(self, name: str) -> Fingerprint:
        """Return a fingerprint of a model's files."""
        ...

    def hint(self, listing: Listing) -> str:
        """Suggest another root if it has no models."""
        ...

    def is_holder(self, name: str) -> bool:
        """Tell whether it has this model."""
        ...

    def directory(self, name: str) -> str:
        """Return the place of a model, existing or not."""
        ...

    def find_own(self, name: str, config_text: str | None) -> ModelSource:
        """Read the sources of a load. Raises ModelNotFound and LoadFailed."""
        ...

    def remove_leftovers(self) -> int:
        """Remove leftovers of killed processes, and return their number."""
        ...
