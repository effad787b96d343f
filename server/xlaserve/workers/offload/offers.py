"""The instances that can execute batches for other workers.

Instances of two workers are equal if they read the same files and configuration, according to the
fingerprint that a reload uses to detect changes.
"""

from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary

from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.registry import Instance
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.station import Served
from xlaserve.workers.fronts.description import UnknownDescription, described

_DIGEST_BYTES = 16


class Offer(NamedTuple):
    """An instance that executes batches of other workers."""

    model: LoadedModel
    work: HostWork


class Offers:
    """Offers by model name and identity of the load. Used from the event loop only."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Instance, Offer]] = {}
        self._identities: WeakKeyDictionary[Instance, bytes] = WeakKeyDictionary()
        """Identities by instance; empty for instances that cannot be described. Computed on demand,
        so that loading thousands of models does not pay for it."""

    def add(self, instance: Served, offer: Offer) -> None:
        """Offer an instance until it is unloaded; replaces an earlier offer."""
        if not isinstance(instance, Instance) or instance.has_left:
            return
        of_model = self._found.setdefault(instance.model, {})
        if instance not in of_model:
            instance.on_leave(partial(self._remove, instance))
        of_model[instance] = offer

    def find(self, model: str, identity: bytes) -> Offer | None:
        """Return the offer of an instance with the same identity as another worker's."""
        for instance, offer in self._found.get(model, {}).items():
            if identity and self.identity(instance) == identity:
                return offer
        return None

    def identity(self, instance: Served) -> bytes:
        """Return an identity that equal instances share; empty if it is unknown.

        Contents of files are not hashed: as for reloads, a changed file differs in inode, size or
        time.
        """
        if not isinstance(instance, Instance):
            return b""
        known = self._identities.get(instance)
        if known is None:
            known = self._identities[instance] = _identity(instance)
        return known

    def _remove(self, instance: Instance) -> None:
        of_model = self._found.get(instance.model, {})
        of_model.pop(instance, None)
        if not of_model:
            self._found.pop(instance.model, None)

    @property
    def models(self) -> Mapping[str, int]:
        """Return how many instances of each model are offered."""
        return {model: len(instances) for model, instances in self._found.items()}


def _identity(instance: Instance) -> bytes:
    mark = instance.fingerprint
    if not isinstance(mark, tuple):
        return b""
    try:
        description = described(instance.info, instance.config)
    except UnknownDescription:
        return b""
    # The configuration is part of the description, which sorts its sets by name.
    rest = [part for part in mark if not isinstance(part, ModelConfig)]
    text = repr((instance.model, rest)).encode(errors="surrogatepass")
    return blake2b(text + description, digest_size=_DIGEST_BYTES).digest()
