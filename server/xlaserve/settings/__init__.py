"""Every knob and every limit of the server, with its unit and default; read once.

A flag beats the environment variable `XLASERVE_<FIELD>`, which beats the default. The string below
each field is its documentation: `xlaserve serve --help` and docs/settings.md are made from it.
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
    """The operator's choices. Immutable; parts of it are passed down."""

    repository: Path
    """Directory of the models: <model>/config.json or config.pbtxt, and <model>/<version>/. Or a
    URL of one of remote_schemes, as s3://bucket/models (docs/storage.md)."""

    # --- Processes ---

    processes: ProcessCount = ONE_PROCESS
    """Processes that are one server: a number, or auto, one for each core (docs/processes.md)."""
    process_roles: ProcessRoles = ProcessRoles.AUTO
    """workers: each has every model, on CPUs; front-ends: one has devices and models, the others
    have the clients; auto: front-ends with a device that is named and not the CPU."""
    front_end_shared_bytes: int = 128 << 20
    """Memory that each front end shares with the engine, in bytes, half for either direction:
    tensors of 64 KiB and more that fit pass through it, others through a socket."""
    max_front_end_requests: int = 16_384
    """Most requests that one front end has passed to the engine and that are not answered."""
    process_answer_seconds: float = 8.0
    """Seconds that a process has to answer its parent before it is replaced; after a fifth of them
    without an answer the server is not ready, and that process is given nothing."""
    spare_engine: bool = True
    """With front ends: keep a process that has imported JAX and takes the place of an engine that
    dies, without which no inference is answered. It takes 128 MiB of the memory for models."""
    offload_seconds: float = 0.002
    """Seconds from which on a batch may be executed by another worker that is idle; 0 for never."""
    offload_shared_bytes: int = 32 << 20
    """Memory that two workers share for that, in bytes, half for either direction."""

    # --- Endpoints ---

    host: str = "127.0.0.1"
    """Address that TCP endpoints listen on."""
    grpc_endpoint: str = "port:8001"
    """Address of gRPC: port:<n> (0: a free one), unix:<path>, or systemd:<FileDescriptorName>."""
    grpc_data_endpoint: str = ""
    """A second place where gRPC is served, for inference; empty for none. ModelMesh knows both."""
    http_endpoint: str = "port:8000"
    """Address of HTTP: port:<n>, unix:<path>, systemd:<name> or none."""
    metrics_endpoint: str = "http"
    """Address of GET /metrics: port:<n>, unix:<path>, systemd:<name>; http (where HTTP is served)
    or none. With an address of its own it is served there only, and /v2/health too, for probes."""
    unix_socket_mode: int = -1
    """Permission bits of unix sockets; -1: 0o660, or 0o666 for the sidecar of modelmesh."""
    probe_socket: str = ""
    """Path of a unix socket where `xlaserve health` asks, without TLS and rules; empty for none."""
    server_name: str = "xlaserve"
    """The server's name in ServerMetadata and GET /v2; some clients ask for `triton`."""
    listen_backlog: int = 4096
    """Connections to each endpoint that may wait to be accepted; what comes beyond is not answered
    until a slot is free. Linux shortens it to net.core.somaxconn."""
    http2_engine: Http2Engine = Http2Engine.OWN
    """HTTP/2 engine of gRPC: own; or h2, the library that it is compared with."""

    # --- TLS ---

    tls_certificate: str = ""
    """File of the certificate chain, in PEM, to serve over TLS; empty for none."""
    tls_key: str = ""
    """File of its private key; empty where the certificate's file holds it."""
    tls_client_ca: str = ""
    """File of the authorities whose clients may connect; empty for all. All three are followed."""
    tls_endpoints: tuple[TlsEndpoint, ...] = tuple(TlsEndpoint)
    """Endpoints that are served over TLS: grpc, http, metrics; may be given more than once."""

    # --- Access ---

    access_rules: str = ""
    """File of the access rules, TOML or JSON (docs/access.md); empty: everybody may do everything.
    Read again when it changes, and at SIGHUP; an invalid file changes nothing."""
    max_principals: int = 10_000
    """Callers whose rates and requests in flight are counted for their quotas at a time."""
    grpc_restricted_protocol: tuple[str, ...] = ()
    """Groups of gRPC requests that need a header, as Triton restricts them:
    <group>,<group>:<key>=<value>, the header is triton-grpc-protocol-<key>; may be repeated."""
    http_restricted_api: tuple[str, ...] = ()
    """The same for HTTP, where the header is <key>. It holds for SageMaker's requests too."""
    allowed_host: tuple[str, ...] = ()
    """A further name that HTTP requests may have as Host, * for any; may be repeated. Addresses,
    localhost, host and the name of the machine may; and any with sagemaker, unless one is given."""
    trusted_proxy: tuple[str, ...] = ()
    """A proxy whose X-Forwarded-For is believed: an address, a network, or unix; repeatable."""
    cors_origin: tuple[str, ...] = ()
    """An origin whose pages may send HTTP requests and gRPC-Web, as https://app.example, * for all;
    may be repeated. None may unless one is given, but pages of the server itself (CORS)."""

    # --- Models ---

    model_repository: tuple[Path, ...] = ()
    """Further repositories, or URLs of remote_schemes; repeatable. The first one stands for the
    argument where that is left out. A model that is in several of them is served from none."""
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    """none: load all at start; poll: follow the repository; explicit: clients load and unload."""
    load_model: tuple[str, ...] = ()
    """With explicit: a model to load at start; may be given more than once, '*' is every model."""
    model_root: tuple[Path, ...] = (Path("/models"), Path("/pvc_mounts"), Path("/opt/ml"))
    """Directory that links and model paths may lead into, besides the repository; repeatable."""
    service: tuple[str, ...] = ()
    """A gRPC service of your own: file.py:factory or package.module:factory; may be repeated."""
    extension: tuple[str, ...] = ()
    """An extension of another package, by its name in the group xlaserve.extensions; repeatable."""
    allow_python_models: bool = False
    """Run Python models (model.py), which may do all that the server may, and which everybody who
    can write to the repository can change. What a client sends with a load is never run."""
    python_process_seconds: float = 60.0
    """Seconds a Python model's process may be silent with requests until a restart; 0: any."""
    python_process_bytes: int = 0
    """Bytes that a Python model's process may hold; one that holds more is restarted. 0 for any."""
    python_shared_bytes: int = 64 << 20
    """Memory that each process of a Python model shares with the server, in bytes, half for either
    direction: tensors that fit pass through it, others through a pipe. 0 for none."""
    poll_interval_seconds: float = 15.0
    """With poll: time between two looks at the repository."""
    poll_unload_fraction: float = 0.5
    """With poll: a look that misses more than this part of the models does not unload any yet."""
    readiness: Readiness = Readiness.STARTUP
    """startup: ready once every load of the start has ended; models: and every one succeeded."""
    exit_on_error: bool = False
    """End the server with an error once a model that is loaded at start has failed."""
    device: Device = Device.AUTO
    """Device of models. Anything but auto fails at start when that device is absent."""

    # --- SageMaker ---

    sagemaker: bool = False
    """Be the container of a SageMaker endpoint: ports, models and mode as SAGEMAKER_* say."""
    sagemaker_multi_model: bool = False
    """With sagemaker: POST and DELETE /models load and unload; else one model is there from the
    start. SAGEMAKER_MULTI_MODEL sets it."""
    default_model: str = ""
    """The model of POST /invocations; if empty, the only one that is loaded."""
    default_accept: str = "application/json"
    """Form of the answers to invocations of SageMaker where Accept leaves it open."""

    # --- Memory ---

    capacity_bytes: int = 0
    """Memory for models on each device; 0 takes the device's own. Devices of the CPU share the
    container's request, or the cgroup's limit."""
    evict: bool = False
    """Evict idle models, the least recently used first, when a load needs their memory."""
    memory_wait_seconds: float = 10.0
    """Seconds a load that needs more memory than is free waits for what unloads and other loads
    in progress give back, and with modelmesh for those to come; then it is refused."""
    memory_overhead_bytes: int = 300 << 20
    """Bytes left of that memory for the process itself, or the device's workspace."""
    container_memory_bytes: int = 0
    """Memory request of the container; else MODEL_SERVER_MEM_REQ_BYTES, CONTAINER_MEM_REQ_BYTES."""

    # --- ModelMesh ---

    modelmesh: bool = False
    """Serve mmesh.ModelRuntime: a ModelMesh sidecar decides what is loaded, and when."""
    id_injection: IdInjection = IdInjection.PATH
    """With modelmesh: path lets it write the id into requests; header leaves them as they are."""
    default_model_size_bytes: int = 16 << 20
    """With modelmesh: the size of a model of which nothing is known, until models were loaded."""
    mesh_slack_bytes: int = -1
    """With modelmesh: bytes of the memory for models that it is not told, for loads that turn out
    larger than it predicted, and for programs that models share; -1 is 5 %, or load_threads times
    the largest model that was seen or is predicted and the most that models share, if that is more,
    but at most a quarter."""
    max_remembered_sizes: int = 10_000
    """With modelmesh: models whose needs are remembered for predictions."""
    model_loading_timeout_ms: int = 30_000
    """With modelmesh: how long it waits for a load; keep it near the slowest real one."""
    limit_model_concurrency: bool = False
    """With modelmesh: let it queue requests and scale by their latency."""
    max_concurrency: int = 4
    """With limit_model_concurrency: requests of one model at a time, if its config has none."""

    # --- Loading and compiling ---

    load_threads: int = 0
    """Models that are loaded at the same time; 0 is one for each core, and eight at most."""
    compile_processes: int = -1
    """Most processes that compile for the CPU; 0 compiles in the server, -1 goes by the machine."""
    compile_process_bytes: int = 4 << 30
    """Most bytes of memory of each of these, and of the process in which a model that a client sent
    is tried, besides that for models; past it the load fails."""
    load_seconds: float = 600.0
    """Seconds a load may take once it has a thread, and one program that is compiled later; past
    it the load fails, and what does not end is abandoned."""
    max_memory_mappings: int = 0
    """Memory mappings that the process may have for another program to be compiled; 0 is 80 % of
    what the system allows (the sysctl vm.max_map_count), at which the process would die."""
    max_abandoned: int = 8
    """Most abandoned loads and compilations, which may keep a core each; past it none begins."""
    background_compile: bool = True
    """Be ready with the smallest and the largest batch; compile the rest while they serve. Not
    with modelmesh, which asks for the size of a model once."""
    max_on_demand_shapes: int = 64
    """Most shapes on demand of a model that has a parameter of this name; 0 refuses such models."""
    max_sequences_per_model: int = 65_536
    """Most sequences that each replica of a model may have in progress; a configuration that asks
    for more is refused. Memory for the states of all of them is reserved with the load."""
    compilation_cache_directory: str = "auto"
    """Directory of compiled programs, private to this user; auto: ~/.cache/xlaserve; or none."""
    compilation_cache_max_bytes: int = 1 << 30
    """Most bytes of that directory; the least recently used are evicted."""
    compilation_cache_max_days: int = 90
    """Days for which a program is kept there that no server has used; 0 keeps it."""
    compilation_cache_url: str = ""
    """URL of remote_schemes where servers share programs, as s3://bucket/programs: what is not in
    the directory is looked for there, and put there. Who may write there runs code here."""
    compilation_cache_url_seconds: float = 5.0
    """Seconds a program may take to come from there; past it it is compiled."""
    conversion_cache_max_bytes: int = 16 << 30
    """Most bytes of ONNX models that loads converted, which are kept there too; the least recently
    used are evicted. With 0, or without the directory, every load converts again."""
    max_conversion_bytes: int = 8 << 30
    """Most bytes of an ONNX model, with its external data, that a load converts."""
    mmap_parameters: bool = False
    """On the CPU, map parameters from their files instead of reading them; always with several
    processes. The files must never be rewritten in place; not for network mounts."""

    # --- GPU ---

    gpu_memory_fraction: float = 0.9
    """With CUDA: the part of each GPU's memory that XLA may take, and models fill. The rest is for
    the driver, libraries, code and command buffers. XLA_CLIENT_MEM_FRACTION counts before it."""
    gpu_command_buffers: bool = True
    """With CUDA: launch kernels as CUDA graphs, which take memory beyond gpu_memory_fraction."""
    gpu_latency_hiding_scheduler: bool = True
    """With CUDA: let sharded models compute while parts are exchanged, with more scratch memory."""
    gpu_autotune_cache: bool = True
    """With CUDA: the cache of programs keeps which kernels were quickest, for all who share it."""
    gpu_metrics_seconds: float = 2.0
    """With CUDA: how often NVML is asked for the metrics of GPUs; 0 for never."""
    matmul_precision: MatmulPrecision = MatmulPrecision.DEFAULT
    """With CUDA or a TPU: the precision of FP32 products and convolutions for which a model says
    none. By default GPUs take TF32, off by 3e-4, as JAX does; highest takes some times as long."""

    # --- Execution ---

    execute_threads: int = 0
    """Threads in which the CPU computes requests outside the event loop; 0 is one less than the
    cores, and two at least. A GPU has two of its own."""
    spare_execute_threads: int = 8
    """Threads besides, each for a model for which no thread computes: while a few models fill the
    others with what takes long, so many more do not wait."""
    inline_execution_seconds: float = 200e-6
    """A model on the CPU that its warm-up measured faster than this runs on the event loop itself;
    a batch, if that is as quick as its requests one by one, and at most four times as long. One
    that takes longer there, or may, since its input says how long it loops, runs in threads."""
    execution_seconds: float = 60.0
    """Seconds an execution in threads or on a device may take. Then its requests are answered with
    an error, and its model is not ready until it has ended. Shorter ones that fail on their device
    make it unready for a second, and longer each time. 0 for any time."""
    dynamic_batching: bool = True
    """Execute requests of one model together where that saves time; no: each by itself."""
    max_requests_per_model: int = 1024
    """Requests of one model that may be in progress; more are refused with RESOURCE_EXHAUSTED."""
    drain_seconds: float = 10.0
    """Seconds an unload waits for requests in progress. Streams that still go on are cut off then;
    other requests end by themselves, and the memory is free behind them."""
    grace_seconds: float = 30.0
    """Seconds the server waits for requests in progress when it is told to exit, and then some
    seconds at most for threads that still compute."""

    # --- Messages ---

    max_held_bytes: int = 1 << 30
    """Most bytes that clients make the server hold, of all protocols and connections: messages,
    also inflated, parsed and decoded, and answers not read. One connection may hold three quarters,
    less the more others hold. Beyond, requests wait, or get RESOURCE_EXHAUSTED or 503."""
    response_cache_bytes: int = 64 << 20
    """Most bytes of answers that are kept for all models with a response_cache; part of
    max_held_bytes, given back under pressure. 0 keeps none: the log names each model that asks."""
    max_spare_bytes: int = 128 << 20
    """Memory of long messages that is kept some seconds for the next ones, beside it: at most an
    eighth of max_held_bytes; 0 keeps none."""
    allocator_kept_bytes: int = 0
    """Largest freed block that is kept for later executions, for ten seconds; 0: none of 8 MiB."""
    max_message_bytes: int = 64 << 20
    """Largest gRPC message or HTTP body that is accepted; also after it was decompressed."""
    compress_answers: bool = True
    """Compress answers of clients that accept it, over HTTP and gRPC, where a trial of the first
    64 KiB shows that a quarter is saved: text is, and numbers of a model are not as a rule."""
    typed_answers: TypedAnswerForm = TypedAnswerForm.BOTH
    """Answer to a gRPC request whose inputs came as typed contents: both, in typed and in raw
    contents; typed; or raw. FP16 and BF16 have no typed contents and are raw."""
    max_typed_answer_bytes: int = 2 << 20
    """Most bytes that typed contents may add to an answer: an integer counts 10 or 5, an element
    of BYTES 64 and its length. Beyond it an answer is raw alone; with typed, it is refused."""
    v2_dialect: V2Dialect = V2Dialect.TRITON
    """Whose form of V2 gRPC has where they differ: triton; mlserver, whose ModelStreamInfer answers
    ModelInferResponse; or kserve, whose ModelMetadataResponse has properties, a map of texts."""
    health_bodies: bool = True
    """Answer what asks whether the server or a model is live or ready with JSON, and with the
    reason where it is not; false: with a status alone, as Triton does."""
    max_message_fields: int = 100_000
    """Most protobuf fields in one message; larger tensors travel as raw bytes in a single field."""
    max_message_depth: int = 100
    """Deepest nesting of one protobuf message."""

    # --- Shared memory ---

    shared_memory: SharedMemoryClients = SharedMemoryClients.LOCAL
    """Clients that may register system shared memory and name it in requests: local, on a unix
    socket or a loopback address; all; none. Who comes through a known proxy is not local."""
    shared_memory_in_place: bool = False
    """Read inputs where they are, instead of copying them once. A client that truncates a region
    then ends the server with SIGBUS, one that writes to it changes requests: for trusted ones."""
    max_shared_memory_regions: int = 256
    """Regions of shared memory that may be registered; each keeps a file open."""
    max_shared_memory_bytes: int = 64 << 30
    """Most bytes of all regions together. They are memory of their clients, not of the server."""

    # --- gRPC ---

    max_streams_per_connection: int = 256
    """Requests that one gRPC connection may have open; eight times as many with modelmesh."""
    max_connections: int = 10240
    """gRPC connections that may be open: a file each, and some 17 KB of memory."""
    max_header_bytes: int = 16 << 10
    """Largest header list of a gRPC request."""
    busy_poll_seconds: float = 0.0002
    """Seconds the event loop looks for the next gRPC request without going to sleep, while they
    come so quickly one after the other; 0 lets it sleep."""
    max_stream_resets: int = 200
    """gRPC requests a connection may cancel in a while beyond those answered; 8 times in a mesh."""
    max_control_frames: int = 2000
    """HTTP/2 frames without content that a connection may send in a while, beyond four for each
    frame of its answers; eight times as many with modelmesh."""
    control_window_seconds: float = 30.0
    """The time in which those two are counted."""
    max_work_per_pass: int = 1024
    """HTTP/2 frames that one connection may have handled before others are served, or 3 ms; a
    request counts as 16, and 16 bytes of headers that have to be decoded as one more."""
    stream_window_bytes: int = 1 << 20
    """Flow-control window of a gRPC request, in bytes, until its message's length is known."""
    connection_window_bytes: int = 16 << 20
    """Flow-control window of a gRPC connection, in bytes not read."""
    max_frame_bytes: int = 1 << 20
    """Longest HTTP/2 frame of a message that clients are asked to send."""
    preface_seconds: float = 5.0
    """Seconds a new gRPC connection may take to begin, and before that any TLS handshake."""

    # --- HTTP ---

    max_http_connections: int = 8192
    """HTTP connections that may be open: a file each."""
    http_idle_seconds: float = 75.0
    """Seconds an HTTP connection may be without a request, and take for the headers of one."""
    max_http_header_bytes: int = 16 << 10
    """Largest request line, and largest single header, of an HTTP request."""
    max_http_heads: int = 2048
    """Heads of HTTP inference requests that are known by their bytes, and not read again."""
    max_http_chunks: int = 65536
    """Most chunks of one HTTP body that comes in chunks."""
    strict_json: bool = False
    """Refuse NaN, Infinity and -Infinity in JSON, with 406, instead of writing them as these
    literals, which Python's json reads."""
    json_surrogates: bool = False
    """Write bytes that are not UTF-8 in JSON as surrogates, which Python's json reads and most
    parsers do not, instead of refusing them with 400."""
    max_json_depth: int = 100
    """Deepest nesting of JSON in an HTTP body."""

    # --- Other limits ---

    max_image_bytes: int = 32 << 20
    """Largest JPEG or PNG that is decoded for a model."""
    max_image_pixels: int = 1 << 24
    """Most pixels of a JPEG or PNG that is decoded for a model."""
    message_timeout_seconds: float = 30.0
    """Seconds a request may take to send its message after its headers, and over HTTP those."""
    answer_timeout_seconds: float = 120.0
    """Seconds within which a client has to read some more of an answer that waits for it. Else its
    connection is closed, or its gRPC stream where others go on, and all they held is released."""
    max_health_watchers: int = 1024
    """Health watches that may be open."""
    max_reflection_requests: int = 1000
    """Questions that one reflection stream may ask."""
    max_infer_streams: int = 4096
    """ModelStreamInfer streams that may be open."""
    max_infer_stream_requests: int = 64
    """Requests in flight of one ModelStreamInfer stream; the next is read once one is answered."""
    max_infer_stream_bytes: int = 1 << 20
    """Bytes of answers of one ModelStreamInfer stream, or of one of server-sent events, that may
    wait for its client; then no more of its requests are read, and models of many answers pause."""
    max_choices: int = 128
    """Answers that one request to OpenAI's endpoints may ask for: prompts times `n`."""
    max_embedding_inputs: int = 2048
    """Inputs that one request for embeddings may have."""
    max_waiting_texts: int = 256
    """Texts of one caller (prompts, chats, grammars) that wait for one model; more are refused."""
    template_seconds: float = 2.0
    """Seconds of the processor that a chat template may take for one text."""
    tokenizer_seconds: float = 1.0
    """And a tokenizer that is not known to be quick."""
    grammar_seconds: float = 0.05
    """And compiling a grammar, JSON schema or regular expression that a client sent."""
    text_process_bytes: int = 512 << 20
    """Memory of each process that does so, of which a model has up to three, beyond its start."""

    # --- Model repository ---

    max_config_bytes: int = 1 << 20
    """Largest model configuration, on disk or in a load request."""
    max_override_bytes: int = 1 << 30
    """Most bytes of `file:` parameters of one load."""
    max_override_files: int = 1000
    """Most `file:` parameters of one load."""
    trial_seconds: float = 60.0
    """Seconds a model that a client sent may take to load in a process first, but for waits for a
    core; 0: none. And of the processor, for the trial of any model's rows; past it they are not."""
    max_models: int = 100_000
    """Models that the repository may hold; further directories are ignored, with a warning."""
    scratch_directory: Path = Path(tempfile.gettempdir())
    """Directory of the files of `file:` parameters while their model is loaded."""

    # --- Models in stores (docs/storage.md) ---

    remote_schemes: tuple[str, ...] = ()
    """Schemes that a repository may be a URL of: s3, gs, az, hf, http, https; may be repeated. None
    unless one is given; all but http and https need an extra (`xlaserve[remote-s3]`)."""
    remote_cache_directory: str = "auto"
    """Directory of fetched models, of this user's servers alone; auto: ~/.cache/xlaserve-models."""
    remote_cache_max_bytes: int = 64 << 30
    """Limit of that directory in bytes; least recently used models that are not loaded go first."""
    remote_threads: int = 4
    """Files that are fetched at a time."""
    remote_stall_seconds: float = 30.0
    """Seconds a store may take to answer, or to send some more; a listing ten times as long."""
    remote_fetch_seconds: float = 3600.0
    """Seconds the files of one model may take to be fetched."""
    remote_max_objects: int = 100_000
    """Objects that one repository in a store may have; with more it is not listed."""

    # --- Log ---

    log_level: str = "auto"
    """debug, info, warning or error; auto is info, and warning in a terminal, which shows more."""
    access_log: str = ""
    """File of a JSON record of each request, or stderr, stdout, fd:<number>; empty for none."""
    access_log_rate: float = 1.0
    """Part of the requests that have an access record; those that failed or were slow always do."""
    access_log_slow_ms: float = 1000.0
    """Milliseconds from which on a request is slow."""
    max_access_records: int = 8192
    """Access records that may wait to be written; beyond them, others are dropped and counted."""
    max_event_bytes: int = 262_144
    """Bytes of the event log (loads, unloads, failures...) that are kept: then the oldest go."""

    # --- Metrics ---

    max_metric_versions: int = 2000
    """Model versions, and models, with series of their own; others share `other`, as is logged."""

    # --- Traces ---

    trace_file: str = ""
    """File of traces, in Triton's form; with a log_frequency, of numbered files beside it. Clients
    turn traces on and off at run time; empty if they may not. Its directory must be there."""
    trace_mode: TraceMode = TraceMode.TRITON
    """triton: traces go to trace_file; opentelemetry: spans are exported over OTLP, to where the
    variables OTEL_* say (needs `xlaserve[otel]`), and every model is traced from the start."""
    trace_level: TraceLevel = TraceLevel.AUTO
    """OFF or TIMESTAMPS: what is traced of all models from the start; auto is OFF with trace_mode
    triton, and TIMESTAMPS with opentelemetry. Clients change it, and the following, at run time."""
    trace_rate: int = 1000
    """One of so many requests is traced."""
    trace_count: int = -1
    """Requests that are traced; -1 for any number."""
    trace_log_frequency: int = 0
    """Traces of each file, which has a number; 0 for one file."""
    max_trace_bytes: int = 64 << 20
    """Most bytes of traces that one run of the server writes; then tracing ends."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_conflicts(self)
