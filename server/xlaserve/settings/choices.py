"""Settings with a fixed set of values, and the meaning of each value."""

import os
from enum import StrEnum
from typing import Self


class ProcessCount(int):
    """A number of processes; `auto` is one per core that this process may run on."""

    def __new__(cls, value: int | str) -> Self:
        """Parse a number or `auto`; raises ValueError."""
        if value == "auto":
            return super().__new__(cls, len(os.sched_getaffinity(0)))
        return super().__new__(cls, value)


ONE_PROCESS = ProcessCount(1)


class ProcessRoles(StrEnum):
    """Roles of the server's processes."""

    AUTO = "auto"
    """Front ends if `device` names an accelerator, otherwise workers."""
    WORKERS = "workers"
    """Each process loads every model and executes its clients' requests."""
    FRONT_ENDS = "front-ends"
    """One process loads the models and executes; the others serve clients."""


class ModelControlMode(StrEnum):
    """Who decides which models are loaded (Triton's model control)."""

    NONE = "none"
    """Every model is loaded at start; clients cannot load or unload."""
    POLL = "poll"
    """The server watches the repository; changes on disk load, reload and unload models."""
    EXPLICIT = "explicit"
    """Clients load and unload models."""


class Device(StrEnum):
    """Kinds of devices."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    TPU = "tpu"


class MatmulPrecision(StrEnum):
    """Precisions of FP32 products, by JAX's names (jax_default_matmul_precision)."""

    DEFAULT = "default"
    """The device's default: TF32 on GPUs that support it, BF16 on TPUs."""
    HIGH = "high"
    """TF32 on GPUs that support it, three BF16 products on TPUs."""
    HIGHEST = "highest"
    """Full FP32."""
    TENSORFLOAT32 = "tensorfloat32"
    """Alias of high."""
    FLOAT32 = "float32"
    """Alias of highest."""

    @property
    def of_xla(self) -> str:
        """Return XLA's name; several JAX names may map to one."""
        same = {"tensorfloat32": "high", "float32": "highest"}
        return same.get(self.value, self.value).upper()


class IdInjection(StrEnum):
    """How ModelMesh sends the id of a model."""

    PATH = "path"
    """In the request message, at the path reported by runtimeStatus, and in a header."""
    HEADER = "header"
    """In a header only; the message keeps the client's model name."""


class Readiness(StrEnum):
    """When the server becomes ready."""

    STARTUP = "startup"
    """After each load at start has ended."""
    MODELS = "models"
    """Like startup, and every model has a ready version."""


class Http2Engine(StrEnum):
    """HTTP/2 implementations for gRPC."""

    OWN = "own"
    """The server's own implementation."""
    H2 = "h2"
    """The h2 library, through grpclib: slower, used as a reference."""


class V2Dialect(StrEnum):
    """Servers whose variant of V2 over gRPC to follow where they differ."""

    TRITON = "triton"
    """Streams use Triton's envelope, metadata has `parameters`."""
    MLSERVER = "mlserver"
    """Streams answer ModelInferResponse and end at the first error; metadata has `parameters`."""
    KSERVE = "kserve"
    """Streams use Triton's envelope, metadata has the `properties` of Open Inference."""


class TypedAnswerForm(StrEnum):
    """Form of answers to gRPC requests with typed contents."""

    BOTH = "both"
    """Answers have typed contents and raw_output_contents: some clients read only one."""
    TYPED = "typed"
    """Answers have typed contents only."""
    RAW = "raw"
    """Answers have raw_output_contents only, as for requests with raw inputs."""


class TlsEndpoint(StrEnum):
    """Endpoints that can use TLS."""

    GRPC = "grpc"
    """grpc_endpoint and grpc_data_endpoint."""
    HTTP = "http"
    METRICS = "metrics"
    """metrics_endpoint, if it has a separate address."""


class SharedMemoryClients(StrEnum):
    """Clients that may register shared memory and use it in requests."""

    LOCAL = "local"
    """Clients on a unix socket or a loopback address."""
    ALL = "all"
    """All clients, which can then read and write shared memory of the server's user."""
    NONE = "none"
    """No clients: the extension is turned off."""


class TraceLevel(StrEnum):
    """The initial trace level, as Triton spells it."""

    AUTO = "auto"
    """OFF for traces in files, TIMESTAMPS for exported spans."""
    OFF = "OFF"
    """No traces."""
    TIMESTAMPS = "TIMESTAMPS"
    """The times of a request's steps."""


class TraceMode(StrEnum):
    """Output formats of traces."""

    TRITON = "triton"
    """Files in Triton's format."""
    OPENTELEMETRY = "opentelemetry"
    """Spans exported over OTLP, configured by the OTEL_* variables."""
