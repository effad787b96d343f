"""The server's self-description."""

from dataclasses import dataclass

NAME = "xlaserve"

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""The protocol extensions that are really there (V2 protocol, Server Metadata)."""


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """Name, version and extensions, as ServerMetadata reports them."""

    version: str
    name: str = NAME
    extensions: tuple[str, ...] = EXTENSIONS
