"""Records what XLA compiles during a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring


@contextmanager
def noted_compilations() -> Iterator[list[str]]:
    """Collect the names of the functions compiled in a block; the list may be cleared."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
