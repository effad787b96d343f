"""Assembles the gRPC server."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from grpclib._typing import IServable

from xlaserve import build
from xlaserve.app.core import Core
from xlaserve.grpc.http2.limits import MAX_REFUSALS, Http2Limits
from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.infer.infer_fast_path import METHOD as INFER_METHOD
from xlaserve.grpc.infer.infer_fast_paths import InferFastPaths
from xlaserve.grpc.infer.infer_stream import InferStreams, StreamLimits
from xlaserve.grpc.infer.long_messages import LongMessages
from xlaserve.grpc.infer.stream_answers import StreamAnswers
from xlaserve.grpc.infer.typed_answers import TypedAnswers
from xlaserve.grpc.injection import Injection, splices
from xlaserve.grpc.methods import INFERENCE_PATHS, methods_of
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.descriptors import DescriptorIndex
from xlaserve.grpc.protobuf.splice import InjectionPath
from xlaserve.grpc.runner import Runner
from xlaserve.grpc.server import GrpcServer
from xlaserve.grpc.services.dialects import Aliases
from xlaserve.grpc.services.health import HealthService
from xlaserve.grpc.services.inference import InferenceService
from xlaserve.grpc.services.model_runtime import ModelRuntimeService
from xlaserve.grpc.services.reflection import SERVICES as REFLECTION_SERVICES
from xlaserve.grpc.services.reflection import reflection_services
from xlaserve.grpc.services.services import ServicesCodec, injection_paths, load_services
from xlaserve.net.tls import ServerTls
from xlaserve.process.endpoints import Listener
from xlaserve.residence.platforms.predictions import READ_SECONDS
from xlaserve.residence.platforms.runtime import ModelRuntime
from xlaserve.residence.readiness import Readiness
from xlaserve.runtime import loaders
from xlaserve.serving.call import Operation, current_call
from xlaserve.serving.models_api import Models
from xlaserve.settings import Settings
from xlaserve.settings.choices import IdInjection, TlsEndpoint, V2Dialect

_CLIENTS_OF_A_MESH = 8
"""Factor for per-connection limits with ModelMesh, which uses one connection for all clients, and
may leave some streams open without sending a request."""


@dataclass(frozen=True, slots=True)
class GrpcDoor:
    """The gRPC server, with the components needed for HTTP and for shutdown."""

    server: GrpcServer
    health: HealthService
    streams: InferStreams
    runner: Runner
    mesh: ModelRuntime | None
    """The runtime that ModelMesh controls; None without ModelMesh."""

    def listen(self, listeners: Sequence[Listener], tls: ServerTls | None) -> None:
        """Serve on all listeners, with TLS if the settings enable it for gRPC."""
        contexts = None if tls is None else tls.of(TlsEndpoint.GRPC)
        for listener in listeners:
            self.server.listen(listener.socket, contexts, name=listener.setting)


def assemble_grpc(core: Core) -> GrpcDoor:
    """Create the gRPC server with all services, from the settings; it does not listen yet."""
    settings = core.settings
    added = load_services(settings.service, Models(core.engine))
    typed = TypedAnswers(settings.typed_answers, settings.max_typed_answer_bytes)
    limits = {
        "max_fields": settings.max_message_fields,
        "max_depth": settings.max_message_depth,
    }
    codec = InferCodec(**limits, typed=typed)
    streams = InferStreams(
        core.engine,
        core.gates,
        codec,
        StreamLimits(
            settings.max_infer_streams,
            settings.max_infer_stream_requests,
            settings.max_infer_stream_bytes,
        ),
        core.workers.host,
        answers=StreamAnswers(codec, bare=settings.v2_dialect is V2Dialect.MLSERVER),
    )
    services: list[IServable] = [
        InferenceService(
            core.description,
            core.engine,
            core.control,
            typed,
            streams,
            tracing=core.tracing,
            has_properties=settings.v2_dialect is V2Dialect.KSERVE,
        ),
        *(service.handler for service in added),
    ]
    paths = {**INFERENCE_PATHS, **injection_paths(added)} if settings.modelmesh else {}
    mesh = _model_runtime(core) if settings.modelmesh else None
    if mesh is not None:
        services.append(_model_runtime_service(core, mesh, paths))
    names = _service_names(services)
    health = HealthService(
        services=names,
        source=Readiness(core.control, core.registry),
        max_watchers=settings.max_health_watchers,
        sight=lambda: core.access.sees(current_call.get(), Operation.READINESS),
    )
    reflection = reflection_services(
        DescriptorIndex.of_contracts(*(s.descriptor_set for s in added if s.descriptor_set)),
        services=[*names, *_service_names([health]), *REFLECTION_SERVICES],
        max_requests=settings.max_reflection_requests,
    )
    splicing = splices(paths, **limits)
    runner = Runner(
        methods_of([*services, Aliases(services), health, *reflection]),
        ServicesCodec(WireCodec(**limits)),
        core.gates,
        Injection(splicing),
        message_seconds=settings.message_timeout_seconds,
    )
    server = GrpcServer(
        runner,
        limits=http2_limits(settings),
        max_connections=settings.max_connections,
        shared=core.shared,
        busy_poll_seconds=settings.busy_poll_seconds,
        engine=settings.http2_engine,
        fast_paths={
            INFER_METHOD: partial(
                InferFastPaths,
                core.engine,
                core.gates,
                codec,
                splicing.get(INFER_METHOD),
                long=LongMessages(core.workers.host, settings.max_message_bytes),
                repeats=core.repeats,
                compress_answers=settings.compress_answers,
            )
        },
    )
    return GrpcDoor(server, health, streams, runner, mesh)


def _model_runtime(core: Core) -> ModelRuntime:
    return ModelRuntime(
        core.settings,
        core.control,
        core.registry,
        core.repository,
        core.capacity,
        predict_size=partial(
            loaders.predict_size,
            processes=core.settings.processes,
            patience_seconds=READ_SECONDS / 2,
        ),
        file_reader=core.file_reader,
    )


def _model_runtime_service(
    core: Core, mesh: ModelRuntime, paths: Mapping[str, InjectionPath]
) -> ModelRuntimeService:
    return ModelRuntimeService(
        mesh,
        version=build.version(),
        paths=paths,
        advertise_paths=core.settings.id_injection is IdInjection.PATH,
    )


def http2_limits(settings: Settings) -> Http2Limits:
    """Return the limits for messages, streams and connections, from the settings."""
    # ModelMesh's sidecar multiplexes many clients on one connection.
    clients = _CLIENTS_OF_A_MESH if settings.modelmesh else 1
    return Http2Limits(
        max_message_bytes=settings.max_message_bytes,
        max_streams=settings.max_streams_per_connection * clients,
        max_header_bytes=settings.max_header_bytes,
        max_frame_bytes=settings.max_frame_bytes,
        stream_window_bytes=settings.stream_window_bytes,
        connection_window_bytes=settings.connection_window_bytes,
        max_resets=settings.max_stream_resets * clients,
        max_control_frames=settings.max_control_frames * clients,
        max_refusals=MAX_REFUSALS * clients,
        window_seconds=settings.control_window_seconds,
        max_work=settings.max_work_per_pass,
        preface_seconds=settings.preface_seconds,
        message_seconds=settings.message_timeout_seconds,
        answer_seconds=settings.answer_timeout_seconds,
        compress_answers=settings.compress_answers,
    )


def _service_names(services: Iterable[object]) -> list[str]:
    paths = (path for service in services for path in service.__mapping__())  # type: ignore[attr-defined]
    return sorted({path.split("/")[1] for path in paths})
