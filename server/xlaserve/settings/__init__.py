"""All settings and limits of the server, with their units and defaults.

A flag takes precedence over the environment variable `XLASERVE_<FIELD>`, which takes precedence
over the default. The strings below the fields are shown by `serve --help` and docs/settings.md.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from xlaserve.settings.bounds import check_bounds
from xlaserve.settings.choices import (
    ONE_PROCESS,
    Device,
    Http2Engine,
    IdInjection,
    MatmulPrecision,
    ModelControlMode,
    ProcessCount,
    ProcessRoles,
    Readiness,
    SharedMemoryClients,
    TlsEndpoint,
    TraceLevel,
    TraceMode,
    TypedAnswerForm,
    V2Dialect,
)
from xlaserve.settings.conflicts import check_conflicts
from xlaserve.settings.derived import Derived


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Derived):
    """The operator's settings. Immutable."""

    repository: Path
    """Model repository: <model>/config.json or config.pbtxt, and <model>/<version>/. Or a
    URL of one of remote_schemes, as s3://bucket/models (docs/storage.md)."""

    # --- Processes ---

    processes: ProcessCount = ONE_PROCESS
    """Number of server processes, or auto for one per core (docs/processes.md)."""
    process_roles: ProcessRoles = ProcessRoles.AUTO
    """workers: each process loads every model, on CPUs; front-ends: one process has the devices and
    models, the others serve clients; auto: front-ends if device names an accelerator."""
    front_end_shared_bytes: int = 128 << 20
    """Shared memory between each front end and the engine in bytes, half for each direction, for
    tensors of 64 KiB and more that fit; other tensors use a socket."""
    max_front_end_requests: int = 16_384
    """Maximum number of unanswered requests that one front end may have forwarded to the engine."""
    process_answer_seconds: float = 8.0
    """Time after which a process that does not answer its parent is replaced, in seconds. After a
    fifth of it the server is not ready, and the process gets no requests."""
    spare_engine: bool = True
    """With front ends: keep a standby process that has imported JAX and replaces the engine if it
    dies, because inference stops until then. It uses 128 MiB of the memory for models."""
    offload_seconds: float = 0.002
    """Seconds of expected execution from which an idle worker may take over a batch; 0: never."""
    offload_shared_bytes: int = 32 << 20
    """Shared memory between two workers for offloaded batches, in bytes, half per direction."""

    # --- Endpoints ---

    host: str = "127.0.0.1"
    """Address that TCP endpoints listen on."""
    grpc_endpoint: str = "port:8001"
    """gRPC address: port:<n> (0 for a free port), unix:<path>, or systemd:<FileDescriptorName>."""
    grpc_data_endpoint: str = ""
    """A second gRPC address, for inference; empty for none. ModelMesh can use both addresses."""
    http_endpoint: str = "port:8000"
    """HTTP address: port:<n>, unix:<path>, systemd:<name>, or none."""
    metrics_endpoint: str = "http"
    """Address of GET /metrics: port:<n>, unix:<path>, systemd:<name>; http (on the HTTP endpoint)
    or none. Only a separate address then has /metrics; it also has /v2/health, for probes."""
    unix_socket_mode: int = -1
    """Permission bits of unix sockets; -1: 0o660, or 0o666 for the sidecar of modelmesh."""
    probe_socket: str = ""
    """Path of a unix socket for `xlaserve health`, without TLS and access rules; empty for none."""
    server_name: str = "xlaserve"
    """The server's name in ServerMetadata and GET /v2; some clients ask for `triton`."""
    listen_backlog: int = 4096
    """Maximum number of connections per endpoint that wait to be accepted; further connections are
    delayed. Linux caps it at net.core.somaxconn."""
    http2_engine: Http2Engine = Http2Engine.OWN
    """HTTP/2 implementation for gRPC: own, or h2, the library used as a reference."""

    # --- TLS ---

    tls_certificate: str = ""
    """PEM file of the certificate chain for TLS; empty to serve without TLS."""
    tls_key: str = ""
    """PEM file of the certificate's private key; empty if the certificate's file contains it."""
    tls_client_ca: str = ""
    """CA file for client certificates; empty to accept any client. All three files are reloaded."""
    tls_endpoints: tuple[TlsEndpoint, ...] = tuple(TlsEndpoint)
    """Endpoints that use TLS: grpc, http, metrics; repeatable."""

    # --- Access ---

    access_rules: str = ""
    """File of access rules, TOML or JSON (docs/access.md); empty: everything is permitted. It is
    reloaded when it changes and on SIGHUP; an invalid file has no effect."""
    max_principals: int = 10_000
    """Maximum number of callers whose quotas (request rates, requests in flight) are tracked."""
    grpc_restricted_protocol: tuple[str, ...] = ()
    """Groups of gRPC requests that require a header, as in Triton: <group>,<group>:<key>=<value>;
    the header is triton-grpc-protocol-<key>. Repeatable."""
    http_restricted_api: tuple[str, ...] = ()
    """Like grpc_restricted_protocol for HTTP, including SageMaker; the header is <key>."""
    allowed_host: tuple[str, ...] = ()
    """A further permitted Host of HTTP requests, * for any; repeatable. Addresses, localhost,
    host and the machine's name are permitted; with sagemaker any Host, unless one is given."""
    trusted_proxy: tuple[str, ...] = ()
    """A proxy whose X-Forwarded-For is trusted: an address, a network, or unix; repeatable."""
    cors_origin: tuple[str, ...] = ()
    """An origin whose pages may send HTTP and gRPC-Web requests (CORS), as https://app.example, *
    for all; repeatable. By default only the server's own pages may."""

    # --- Models ---

    model_repository: tuple[Path, ...] = ()
    """Further repositories, or URLs of remote_schemes; repeatable. The first one replaces the
    argument if that is missing. A model found in several repositories is not served."""
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    """none: load all at start; poll: watch the repository; explicit: clients load and unload."""
    load_model: tuple[str, ...] = ()
    """With explicit: a model to load at start, '*' for all; repeatable."""
    model_root: tuple[Path, ...] = (Path("/models"), Path("/pvc_mounts"), Path("/opt/ml"))
    """Directory that links and model paths may lead to, besides the repository; repeatable."""
    service: tuple[str, ...] = ()
    """A custom gRPC service: file.py:factory or package.module:factory; repeatable."""
    extension: tuple[str, ...] = ()
    """An extension of another package, by its name in the group xlaserve.extensions; repeatable."""
    allow_python_models: bool = False
    """Run Python models (model.py). They have the server's permissions, and everybody who can write
    to the repository can change them. Code that clients send with a load is never run."""
    python_process_seconds: float = 60.0
    """Silent seconds after which a Python model's process with requests is restarted; 0: never."""
    python_process_bytes: int = 0
    """Memory limit in bytes of a Python model's process, which is restarted beyond it; 0: none."""
    python_shared_bytes: int = 64 << 20
    """Shared memory between the server and each Python model's process in bytes, half for each
    direction, for tensors that fit; other tensors use a pipe. 0 for none."""
    poll_interval_seconds: float = 15.0
    """With poll: seconds between two scans of the repository."""
    poll_unload_fraction: float = 0.5
    """With poll: if a scan misses more than this fraction of the models, none is unloaded yet."""
    readiness: Readiness = Readiness.STARTUP
    """startup: ready when all loads at start have ended; models: and all have succeeded."""
    exit_on_error: bool = False
    """Exit with an error if a model fails to load at start."""
    device: Device = Device.AUTO
    """Device for models. Except with auto, the server does not start without that device."""

    # --- SageMaker ---

    sagemaker: bool = False
    """Run as the container of a SageMaker endpoint, configured by the SAGEMAKER_* variables."""
    sagemaker_multi_model: bool = False
    """With sagemaker: POST and DELETE /models load and unload models; otherwise one model is loaded
    at start. Set by SAGEMAKER_MULTI_MODEL."""
    default_model: str = ""
    """The model for POST /invocations; empty: the only loaded model."""
    default_accept: str = "application/json"
    """Content type of answers to SageMaker invocations if Accept does not decide it."""

    # --- Memory ---

    capacity_bytes: int = 0
    """Memory for models on each device in bytes; 0 uses the device's memory. CPU devices share the
    container's memory request, or the cgroup's limit."""
    evict: bool = False
    """Evict idle models, the least recently used first, when a load needs their memory."""
    memory_wait_seconds: float = 10.0
    """Time in seconds that a load waits for memory which unloads and other loads are about to
    release, and with modelmesh for further unloads; then the load is refused."""
    memory_overhead_bytes: int = 300 << 20
    """Bytes of capacity reserved for the process itself, or for the device's workspace."""
    container_memory_bytes: int = 0
    """Memory request; else MODEL_SERVER_MEM_REQ_BYTES, CONTAINER_MEM_REQ_BYTES."""

    # --- ModelMesh ---

    modelmesh: bool = False
    """Serve mmesh.ModelRuntime: a ModelMesh sidecar decides which models are loaded and when."""
    id_injection: IdInjection = IdInjection.PATH
    """With modelmesh: path lets it write the id into requests; header leaves requests unchanged."""
    default_model_size_bytes: int = 16 << 20
    """With modelmesh: assumed size of an unknown model, before any model has been loaded."""
    mesh_slack_bytes: int = -1
    """With modelmesh: memory for models that is not reported to it, in bytes, as a reserve for
    loads that need more than predicted and for programs that models share. -1: 5 % of the memory,
    or more if load_threads times the largest known or predicted model plus the largest shared part
    is more, but at most a quarter."""
    max_remembered_sizes: int = 10_000
    """With modelmesh: number of models whose sizes are remembered for predictions."""
    model_loading_timeout_ms: int = 30_000
    """With modelmesh: its timeout for a load; set it close to the slowest real load."""
    limit_model_concurrency: bool = False
    """With modelmesh: let it queue requests and scale by latency."""
    max_concurrency: int = 4
    """With limit_model_concurrency: concurrent requests per model, unless its config sets it."""

    # --- Loading and compiling ---

    load_threads: int = 0
    """Number of concurrent loads; 0 for one per core, at most eight."""
    compile_processes: int = -1
    """Maximum number of compiler processes (CPU); 0 compiles in the server, -1 is automatic."""
    compile_process_bytes: int = 4 << 30
    """Memory limit in bytes of each compiler process and of the process that tries a client's
    model, in addition to the memory for models; a load that exceeds it fails."""
    load_seconds: float = 600.0
    """Time limit in seconds for a load, from when it has a thread, and for an on-demand
    compilation. The load then fails; a thread that hangs is abandoned."""
    max_memory_mappings: int = 0
    """Memory mappings up to which the process may compile further programs; 0 is 80 % of the
    system's limit (sysctl vm.max_map_count), which would crash the process."""
    max_abandoned: int = 8
    """Maximum abandoned loads and compilations, up to a core each; beyond it none is started."""
    background_compile: bool = True
    """Become ready with the smallest and largest batch size compiled, and compile the others in the
    background. Not with modelmesh, which requests a model's size only once."""
    max_on_demand_shapes: int = 64
    """Maximum of the model parameter of this name (shapes on demand); 0 refuses such models."""
    max_sequences_per_model: int = 65_536
    """Maximum number of active sequences per replica; models that configure more are refused. The
    memory for the states of all sequences is reserved at load."""
    compilation_cache_directory: str = "auto"
    """Directory of compiled programs, private to this user; auto: ~/.cache/xlaserve; or none."""
    compilation_cache_max_bytes: int = 1 << 30
    """Size limit of compilation_cache_directory in bytes; least recently used programs go first."""
    compilation_cache_max_days: int = 90
    """Days after which an unused program in the compilation cache is evicted; 0: never."""
    compilation_cache_url: str = ""
    """URL of remote_schemes with programs that servers share, as s3://bucket/programs: read if the
    directory lacks a program, and written after compiling. Writers can run code on this server."""
    compilation_cache_url_seconds: float = 5.0
    """Time limit in seconds to read a program from the URL; then it is compiled."""
    conversion_cache_max_bytes: int = 16 << 30
    """Size limit in bytes of converted ONNX models in the compilation cache, evicted by LRU.
    With 0, or without a compilation cache, every load converts again."""
    max_conversion_bytes: int = 8 << 30
    """Maximum size in bytes of an ONNX model, with its external data, that a load converts."""
    mmap_parameters: bool = False
    """On the CPU, map parameter files into memory instead of reading them; always with several
    processes. Files must never be rewritten in place; not for network mounts."""

    # --- GPU ---

    gpu_memory_fraction: float = 0.9
    """With CUDA: fraction of each GPU's memory for XLA and the models. The rest is for the driver,
    libraries, code and command buffers. XLA_CLIENT_MEM_FRACTION takes precedence."""
    gpu_command_buffers: bool = True
    """With CUDA: launch kernels as CUDA graphs, which need memory beyond gpu_memory_fraction."""
    gpu_latency_hiding_scheduler: bool = True
    """With CUDA: overlap computation and communication of sharded models; needs more memory."""
    gpu_autotune_cache: bool = True
    """With CUDA: keep XLA's autotuning results in the compilation cache."""
    gpu_metrics_seconds: float = 2.0
    """With CUDA: interval in seconds between reads of GPU metrics from NVML; 0: never."""
    matmul_precision: MatmulPrecision = MatmulPrecision.DEFAULT
    """With CUDA or a TPU: precision of FP32 products and convolutions if the model leaves it
    open. By default GPUs use TF32 (error 3e-4), like JAX; highest takes several times as long."""

    # --- Execution ---

    execute_threads: int = 0
    """Threads for executions on the CPU outside of the event loop; 0: one less than the cores, at
    least two. Each GPU has two further threads."""
    spare_execute_threads: int = 8
    """Additional threads, each only for a model that no thread is executing: if slow models occupy
    all other threads, this many further models need not wait."""
    inline_execution_seconds: float = 200e-6
    """Execute a CPU model on the event loop if its warm-up took less than this; a batch, if it is
    as fast as single requests and takes at most four times as long. Models that take longer there,
    or whose loops depend on inputs, execute on threads."""
    execution_seconds: float = 60.0
    """Time limit in seconds of an execution on a thread or device. Its requests then fail, and the
    model is not ready until it ends. After other device failures the model is not ready for a
    second, then longer each time. 0: no limit."""
    dynamic_batching: bool = True
    """Batch requests for the same model if that saves time; false: execute each by itself."""
    max_requests_per_model: int = 1024
    """Maximum requests in progress per model; others are refused with RESOURCE_EXHAUSTED."""
    drain_seconds: float = 10.0
    """Time in seconds that an unload waits for requests in progress. Streams are then cut off;
    other requests complete, and the memory is free afterwards."""
    grace_seconds: float = 30.0
    """Time in seconds that the server waits for requests in progress when it is told to exit, and
    then a few seconds for threads that are still computing."""

    # --- Messages ---

    max_held_bytes: int = 1 << 30
    """Memory in bytes that clients' data may use in total: messages (compressed, decompressed and
    decoded) and unread answers. A connection may use three quarters, less if others use more.
    Beyond it requests wait, or get RESOURCE_EXHAUSTED or 503."""
    response_cache_bytes: int = 64 << 20
    """Maximum size in bytes of cached answers of all models with a response_cache; part of
    max_held_bytes, freed under pressure. 0 disables it; affected models are logged."""
    max_spare_bytes: int = 128 << 20
    """Buffers of long messages that are kept a few seconds for reuse, in bytes, in addition: at
    most an eighth of max_held_bytes; 0 for none."""
    allocator_kept_bytes: int = 0
    """Largest freed block in bytes that is kept ten seconds for reuse; 0: none from 8 MiB on."""
    max_message_bytes: int = 64 << 20
    """Maximum size in bytes of a gRPC message or HTTP body, also after decompression."""
    compress_answers: bool = True
    """Compress answers (HTTP and gRPC) if the client accepts it and compressing the first 64 KiB
    saves a quarter, which is typical for text but not for numbers."""
    typed_answers: TypedAnswerForm = TypedAnswerForm.BOTH
    """Answers to gRPC requests with typed contents: both (in typed and raw contents), typed, or
    raw. FP16 and BF16 have no typed contents and are always raw."""
    max_typed_answer_bytes: int = 2 << 20
    """Maximum bytes that typed contents may add to an answer: an integer counts 10 or 5, a BYTES
    element 64 and its length. Beyond it answers are raw only, or refused with typed."""
    v2_dialect: V2Dialect = V2Dialect.TRITON
    """Dialect of V2 gRPC: triton; mlserver, whose ModelStreamInfer answers ModelInferResponse; or
    kserve, whose ModelMetadataResponse has properties, a map of strings."""
    health_bodies: bool = True
    """Answer HTTP health requests (live, ready) with JSON that gives the reason if not ready;
    false: with a status alone, as Triton does."""
    max_message_fields: int = 100_000
    """Maximum number of protobuf fields per message; send larger tensors as raw bytes."""
    max_message_depth: int = 100
    """Maximum nesting depth of a protobuf message."""

    # --- Shared memory ---

    shared_memory: SharedMemoryClients = SharedMemoryClients.LOCAL
    """Clients that may register system shared memory and use it in requests: local (on a unix
    socket or a loopback address), all, or none. Clients of a known proxy are not local."""
    shared_memory_in_place: bool = False
    """Read inputs in place instead of copying them. A client that truncates a region then crashes
    the server (SIGBUS), and writes to it change requests: only for trusted clients."""
    max_shared_memory_regions: int = 256
    """Maximum number of registered shared memory regions; each keeps a file open."""
    max_shared_memory_bytes: int = 64 << 30
    """Maximum size of all regions together. This memory belongs to clients, not to the server."""

    # --- gRPC ---

    max_streams_per_connection: int = 256
    """Maximum open requests per gRPC connection; eight times as many with modelmesh."""
    max_connections: int = 10240
    """Maximum number of open gRPC connections: a file descriptor and about 17 KB each."""
    max_header_bytes: int = 16 << 10
    """Maximum size in bytes of a gRPC request's header list."""
    busy_poll_seconds: float = 0.0002
    """Time in seconds that the event loop polls for the next gRPC request without sleeping, while
    requests arrive in quick succession; 0: never poll."""
    max_stream_resets: int = 200
    """Requests a connection may cancel per control_window_seconds, plus 1 per answer; mesh: 8x."""
    max_control_frames: int = 2000
    """HTTP/2 frames without content a connection may send per control_window_seconds, beyond four
    per frame of its answers; eight times as many with modelmesh."""
    control_window_seconds: float = 30.0
    """Period of max_stream_resets and max_control_frames, in seconds."""
    max_work_per_pass: int = 1024
    """Maximum HTTP/2 frames handled for a connection before others are served, or 3 ms; a request
    counts as 16 frames, and 16 bytes of headers to be decoded as one."""
    stream_window_bytes: int = 1 << 20
    """Flow-control window of a gRPC request in bytes, until its message's length is known."""
    connection_window_bytes: int = 16 << 20
    """Flow-control window of a gRPC connection in bytes that were received but not read."""
    max_frame_bytes: int = 1 << 20
    """Maximum HTTP/2 frame size in bytes that clients may use for messages."""
    preface_seconds: float = 5.0
    """Time limit in seconds for a gRPC connection's preface, and for its TLS handshake."""

    # --- HTTP ---

    max_http_connections: int = 8192
    """Maximum number of open HTTP connections: a file descriptor each."""
    http_idle_seconds: float = 75.0
    """Time limit in seconds for an idle HTTP connection, and for receiving a request's headers."""
    max_http_header_bytes: int = 16 << 10
    """Maximum size in bytes of an HTTP request line, and of a single header."""
    max_http_heads: int = 2048
    """Maximum number of parsed HTTP inference request heads that are cached."""
    max_http_chunks: int = 65536
    """Maximum number of chunks of a chunked HTTP body."""
    strict_json: bool = False
    """Answer 406 if outputs contain NaN, Infinity or -Infinity, instead of writing these literals
    to JSON, which only some parsers such as Python's accept."""
    json_surrogates: bool = False
    """Write bytes that are not UTF-8 as surrogates in JSON, which Python's json reads but most
    parsers do not, instead of answering 400."""
    max_json_depth: int = 100
    """Maximum nesting depth of JSON in an HTTP body."""

    # --- Other limits ---

    max_image_bytes: int = 32 << 20
    """Maximum size in bytes of a JPEG or PNG that is decoded for a model."""
    max_image_pixels: int = 1 << 24
    """Maximum number of pixels of a JPEG or PNG that is decoded for a model."""
    message_timeout_seconds: float = 30.0
    """Time limit in seconds to receive a request's message after its headers, or an HTTP body."""
    answer_timeout_seconds: float = 120.0
    """Time in seconds in which a client must read more of a pending answer. Otherwise its
    connection is closed (or only the stream, if others make progress) and its memory freed."""
    max_health_watchers: int = 1024
    """Maximum number of open health watches."""
    max_reflection_requests: int = 1000
    """Maximum number of questions per reflection stream."""
    max_infer_streams: int = 4096
    """Maximum number of open ModelStreamInfer streams."""
    max_infer_stream_requests: int = 64
    """Maximum requests in flight per ModelStreamInfer stream; each completion lets another in."""
    max_infer_stream_bytes: int = 1 << 20
    """Bytes of unread answers per ModelStreamInfer or server-sent events stream beyond which the
    server reads no further requests from it, and decoupled models pause."""
    max_choices: int = 128
    """Maximum answers per request to OpenAI's endpoints: prompts times `n`."""
    max_embedding_inputs: int = 2048
    """Maximum number of inputs per embeddings request."""
    max_waiting_texts: int = 256
    """Maximum texts (prompts, chats, grammars) per caller waiting for a model; more are refused."""
    template_seconds: float = 2.0
    """Processor time in seconds that a chat template may take for one text."""
    tokenizer_seconds: float = 1.0
    """Processor time in seconds to tokenize a text, unless the tokenizer is known to be fast."""
    grammar_seconds: float = 0.05
    """Processor time in seconds to compile a client's grammar, schema or regular expression."""
    text_process_bytes: int = 512 << 20
    """Memory in bytes of each text process beyond its start; a model has up to three."""

    # --- Model repository ---

    max_config_bytes: int = 1 << 20
    """Maximum size in bytes of a model configuration, on disk or in a load request."""
    max_override_bytes: int = 1 << 30
    """Maximum total size in bytes of a load's `file:` parameters."""
    max_override_files: int = 1000
    """Maximum number of `file:` parameters per load."""
    trial_seconds: float = 60.0
    """Time limit in seconds to try a client's model in a separate process, excluding waits for a
    core; 0: no trial. Also limits the processor time of row trials."""
    max_models: int = 100_000
    """Maximum number of models in the repository; others are ignored with a warning."""
    scratch_directory: Path = Path(tempfile.gettempdir())
    """Directory of the files of `file:` parameters while their model is being loaded."""

    # --- Models in stores (docs/storage.md) ---

    remote_schemes: tuple[str, ...] = ()
    """Permitted URL schemes of repositories: s3, gs, az, hf, http, https; repeatable. None by
    default; all but http and https need an extra (`xlaserve[remote-s3]`)."""
    remote_cache_directory: str = "auto"
    """Directory of fetched models, private to this user; auto: ~/.cache/xlaserve-models."""
    remote_cache_max_bytes: int = 64 << 30
    """Size limit of remote_cache_directory in bytes; evicts LRU models that are not loaded."""
    remote_threads: int = 4
    """Number of concurrent downloads."""
    remote_stall_seconds: float = 30.0
    """Time in seconds a store may take to answer, or to send more data; ten times for a listing."""
    remote_fetch_seconds: float = 3600.0
    """Time limit in seconds to fetch the files of one model."""
    remote_max_objects: int = 100_000
    """Maximum number of objects of a repository in a store; larger ones are not listed."""

    # --- Log ---

    log_level: str = "auto"
    """debug, info, warning or error; auto: info, or warning for one process in a terminal."""
    access_log: str = ""
    """File for a JSON record per request, or stderr, stdout, fd:<number>; empty for none."""
    access_log_rate: float = 1.0
    """Fraction of requests that get an access record; failed and slow requests always do."""
    access_log_slow_ms: float = 1000.0
    """Milliseconds from which a request counts as slow."""
    max_access_records: int = 8192
    """Maximum number of access records waiting to be written; others are dropped and counted."""
    max_event_bytes: int = 262_144
    """Size in bytes of the event log (loads, unloads, failures...); oldest events go first."""

    # --- Metrics ---

    max_metric_versions: int = 2000
    """Maximum model versions, and models, with their own series; others share `other` (logged)."""

    # --- Traces ---

    trace_file: str = ""
    """File of traces in Triton's format; with a log_frequency, several numbered files. Clients can
    turn tracing on and off at run time; empty forbids this. Its directory must exist."""
    trace_mode: TraceMode = TraceMode.TRITON
    """triton: write traces to trace_file; opentelemetry: export spans over OTLP as the OTEL_*
    variables say (needs `xlaserve[otel]`), for every model from the start."""
    trace_level: TraceLevel = TraceLevel.AUTO
    """OFF or TIMESTAMPS: trace level of all models from the start; auto is OFF with trace_mode
    triton, TIMESTAMPS with opentelemetry. Clients can change it and the next ones at run time."""
    trace_rate: int = 1000
    """One of this many requests is traced."""
    trace_count: int = -1
    """Number of requests to trace; -1 for any number."""
    trace_log_frequency: int = 0
    """Traces per numbered file; 0 for a single file."""
    max_trace_bytes: int = 64 << 20
    """Maximum bytes of traces that a server writes; then tracing ends."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_conflicts(self)
