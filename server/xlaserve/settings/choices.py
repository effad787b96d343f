"""Settings with a fixed set of values, and the meaning of each value."""

import os
from enum import StrEnum
from typing import Self


class ProcessCount(int):
    """A number of processes; `auto` is one for each core that this process may run on."""

    def __new__(cls, value: int | str) -> Self:
        """Read a number or `auto`; raises ValueError."""
        if value == "auto":
            return super().__new__(cls, len(os.sched_getaffinity(0)))
        return super().__new__(cls, value)


ONE_PROCESS = ProcessCount(1)


class ProcessRoles(StrEnum):
    """Parts that the processes of a server have."""

    AUTO = "auto"
    """Front ends with a device that is named and is not the CPU, else workers."""
    WORKERS = "workers"
    """Each loads every model and executes what its clients ask for."""
    FRONT_ENDS = "front-ends"
    """One loads the models and executes, the others have the clients."""


class ModelControlMode(StrEnum):
    """Modes of deciding which models are loaded (Triton's model control)."""

    NONE = "none"
    """Every model is loaded at start; clients can change nothing."""
    POLL = "poll"
    """The repository is watched; changes on disk load, reload and unload."""
    EXPLICIT = "explicit"
    """Clients load and unload."""


class Device(StrEnum):
    """Kinds of devices."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    TPU = "tpu"


class MatmulPrecision(StrEnum):
    """Precisions of FP32 products, by JAX's names (jax_default_matmul_precision)."""

    DEFAULT = "default"
    """The device's own: TF32 on GPUs that have it, BF16 on TPUs."""
    HIGH = "high"
    """TF32 on GPUs that have it, three products of BF16 on TPUs."""
    HIGHEST = "highest"
    """FP32."""
    TENSORFLOAT32 = "tensorfloat32"
    """Another name of high."""
    FLOAT32 = "float32"
    """Another name of highest."""

    @property
    def of_xla(self) -> str:
        """Return XLA's name for it: those of JAX are several for one."""
        same = {"tensorfloat32": "high", "float32": "highest"}
        return same.get(self.value, self.value).upper()


class IdInjection(StrEnum):
    """Ways for ModelMesh to send the id of a model."""

    PATH = "path"
    """In the request message, at the path that runtimeStatus advertises, and in a header."""
    HEADER = "header"
    """In a header only; the message keeps the name that the client wrote."""


class Readiness(StrEnum):
    """Conditions of readiness."""

    STARTUP = "startup"
    """Every model that is loaded at start has been tried."""
    MODELS = "models"
    """And none of them is without a ready version."""


class Http2Engine(StrEnum):
    """HTTP/2 engines under gRPC."""

    OWN = "own"
    """The server's own engine."""
    H2 = "h2"
    """The h2 library, through grpclib: slower, and the reference."""


class V2Dialect(StrEnum):
    """Servers whose form of V2 over gRPC clients expect, where the forms differ."""

    TRITON = "triton"
    """Streams have Triton's envelope, metadata has `parameters`."""
    MLSERVER = "mlserver"
    """Streams answer ModelInferResponse, and an error ends them; metadata has `parameters`."""
    KSERVE = "kserve"
    """Streams have Triton's envelope, metadata has the `properties` of Open Inference."""


class TypedAnswerForm(StrEnum):
    """Answers to gRPC requests whose inputs came as typed contents."""

    BOTH = "both"
    """In typed contents and in raw_output_contents: there are clients that read only one."""
    TYPED = "typed"
    """In typed contents."""
    RAW = "raw"
    """In raw_output_contents, as a request with raw inputs is."""


class TlsEndpoint(StrEnum):
    """Endpoints that can be served over TLS."""

    GRPC = "grpc"
    """grpc_endpoint and grpc_data_endpoint."""
    HTTP = "http"
    METRICS = "metrics"
    """metrics_endpoint, where it has an address of its own."""


class SharedMemoryClients(StrEnum):
    """Clients that may register shared memory and name it in requests."""

    LOCAL = "local"
    """Those on a unix socket or a loopback address."""
    ALL = "all"
    """All: whoever reaches the server reads and writes shared memory of its user."""
    NONE = "none"
    """None: the extension is turned off."""


class TraceLevel(StrEnum):
    """The detail of traces from the start on, as Triton spells it."""

    AUTO = "auto"
    """Nothing in files, and times in spans that are exported."""
    OFF = "OFF"
    """Nothing."""
    TIMESTAMPS = "TIMESTAMPS"
    """The times of its steps."""


class TraceMode(StrEnum):
    """Forms of traces."""

    TRITON = "triton"
    """Files in Triton's form."""
    OPENTELEMETRY = "opentelemetry"
    """Spans that are exported over OTLP, as the variables OTEL_* say."""
