"""Variants of V2 over gRPC in MLServer and the Open Inference Protocol."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import betterproto
from grpclib._typing import IServable
from grpclib.const import Handler

from xlaserve.grpc.methods import ALIASES
from xlaserve_proto import inference as pb

# betterproto resolves the types of inherited fields in this module.
from xlaserve_proto.inference import (  # noqa: F401
    InferParameter,
    ModelMetadataResponseTensorMetadata,
)


class Aliases:
    """Serves methods of other services under the names in `ALIASES`."""

    def __init__(self, services: Iterable[IServable]) -> None:
        known = {path: one for each in services for path, one in each.__mapping__().items()}
        self._mapping = {path: known[other] for path, other in ALIASES.items()}

    def __mapping__(self) -> dict[str, Handler]:
        """Return a map from full method names to handlers, as grpclib requires."""
        return dict(self._mapping)


@dataclass(eq=False, repr=False)
class MetadataWithProperties(pb.ModelMetadataResponse):
    """ModelMetadataResponse of the Open Inference Protocol.

    Its field 6 maps to strings; in MLServer and by default in this server, it maps to messages.
    """

    parameters: dict[str, str] = betterproto.map_field(  # type: ignore[assignment]  # noqa: RUF009
        6, betterproto.TYPE_STRING, betterproto.TYPE_STRING
    )

    @classmethod
    def of(cls, metadata: pb.ModelMetadataResponse, properties: Mapping[str, str]) -> Self:
        """Return a copy of a response, with these properties."""
        return cls(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=metadata.inputs,
            outputs=metadata.outputs,
            parameters=dict(properties),
        )


# The inherited metadata has the parent's type for the map, so build it anew.
MetadataWithProperties._betterproto_meta = betterproto.ProtoClassMetadata(MetadataWithProperties)
