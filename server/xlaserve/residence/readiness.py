"""Readiness of the server and of models, with notification of possible changes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from xlaserve.residence.control import ModelControl
from xlaserve.residence.registry import Registry


class Readiness:
    """Health of the server, and of its models by name."""

    def __init__(self, control: ModelControl, registry: Registry) -> None:
        self._control = control
        self._registry = registry

    def server_ready(self) -> bool:
        """Tell whether the server is ready."""
        return self._control.follower.server_ready

    def model_ready(self, name: str) -> bool | None:
        """Tell whether a model answers; None if it does not exist."""
        if self._registry.find(name) is None:
            return None if self.is_settled else False
        return self._registry.ready(name) and not self._control.plane.conceals(name)

    @property
    def is_settled(self) -> bool:
        """Tell whether the repository was read completely: a missing model then does not exist."""
        return self._registry.standing.row.is_settled

    def model_names(self) -> list[str]:
        """Return the names of models for which a load was attempted."""
        return [model.name for model in self._registry.models()]

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """Provide, within a block, an event that is set whenever readiness may have changed."""
        changed = asyncio.Event()
        with self._registry.observe(changed.set):
            yield changed
