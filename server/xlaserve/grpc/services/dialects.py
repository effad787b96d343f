"""Forms of V2 over gRPC that other servers than Triton have."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import betterproto
from grpclib._typing import IServable
from grpclib.const import Handler

from xlaserve.grpc.methods import ALIASES
from xlaserve_proto import inference as pb

# Fields of a parent name them, and betterproto looks here.
from xlaserve_proto.inference import (  # noqa: F401
    InferParameter,
    ModelMetadataResponseTensorMetadata,
)


class Aliases:
    """A service whose methods are those of others by other names."""

    def __init__(self, services: Iterable[IServable]) -> None:
        known = {path: one for each in services for path, one in each.__mapping__().items()}
        self._mapping = {path: known[other] for path, other in ALIASES.items()}

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers of all methods."""
        return dict(self._mapping)


@dataclass(eq=False, repr=False)
class MetadataWithProperties(pb.ModelMetadataResponse):
    """ModelMetadataResponse as the Open Inference Protocol has it.

    There the values of the map 6 are texts, where MLServer and this server have messages.
    """

    parameters: dict[str, str] = betterproto.map_field(  # type: ignore[assignment]  # noqa: RUF009
        6, betterproto.TYPE_STRING, betterproto.TYPE_STRING
    )

    @classmethod
    def of(cls, said: pb.ModelMetadataResponse, properties: Mapping[str, str]) -> Self:
        """Return metadata with these properties."""
        return cls(
            name=said.name,
            versions=said.versions,
            platform=said.platform,
            inputs=said.inputs,
            outputs=said.outputs,
            parameters=dict(properties),
        )


# Not that of its parent, which has another type for the map.
MetadataWithProperties._betterproto_meta = betterproto.ProtoClassMetadata(MetadataWithProperties)
