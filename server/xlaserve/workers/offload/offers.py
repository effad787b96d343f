"""The instances that execute batches for other workers, by their files and configuration.

Two workers have the same instance where they read the same files and the same configuration: the
mark by which a reload knows whether anything has changed.
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
    """An instance that executes batches of others."""

    model: LoadedModel
    work: HostWork


class Offers:
    """Offers by the name of the model and the identity of the load. Of the event loop."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Instance, Offer]] = {}
        self._identities: WeakKeyDictionary[Instance, bytes] = WeakKeyDictionary()
        """Empty for those that cannot be described. Made when they are asked for: a load of one of
        a thousand models is not to pay for it."""

    def add(self, instance: Served, offer: Offer) -> None:
        """Offer an instance until it leaves, with what executes it from now on."""
        if not isinstance(instance, Instance) or instance.has_left:
            return
        of_model = self._found.setdefault(instance.model, {})
        if instance not in of_model:
            instance.on_leave(partial(self._remove, instance))
        of_model[instance] = offer

    def find(self, model: str, identity: bytes) -> Offer | None:
        """Return the offer of an instance that was made of the same as that of another worker."""
        for instance, offer in self._found.get(model, {}).items():
            if identity and self.identity(instance) == identity:
                return offer
        return None

    def identity(self, instance: Served) -> bytes:
        """Return the identity that equal instances share; empty if unknown.

        Digests of files are not in it: as with reloads, a file that was changed has another inode,
        size or time.
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
    # The configuration is in the description, where the order of its sets is that of their names.
    rest = [part for part in mark if not isinstance(part, ModelConfig)]
    text = repr((instance.model, rest)).encode(errors="surrogatepass")
    return blake2b(text + description, digest_size=_DIGEST_BYTES).digest()
