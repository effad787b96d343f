"""Name, version and extensions of the server."""

from dataclasses import dataclass
from typing import Self

from xlaserve.settings import Settings
from xlaserve.settings.choices import SharedMemoryClients

NAME = "xlaserve"

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
    "classification",
    "logging",
)
"""Protocol extensions that every server supports (V2 protocol, Server Metadata)."""


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """Name, version and extensions, as ServerMetadata reports them."""

    version: str
    name: str = NAME
    extensions: tuple[str, ...] = EXTENSIONS

    @classmethod
    def of(cls, settings: Settings, *, version: str) -> Self:
        """Return the description of a server with these settings."""
        extensions: list[str] = [*EXTENSIONS]
        if settings.shared_memory is not SharedMemoryClients.NONE:
            extensions.append("system_shared_memory")
        if settings.trace_file:
            extensions.append("trace")
        return cls(version, settings.server_name, tuple(extensions))
