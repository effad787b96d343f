"""What people say of the architecture; every name in it is looked up in the code."""

from architecture.lives import Life
from architecture.workers import Worker

INTRODUCTION = """# Architecture

Made by `tools/draw_architecture.py`, which reads the rooms, the arrows and the limits from the
code and looks up every name below in it: a step, a thread or a limit that is not there any more
fails `tox run -e generated`.

One asyncio process. A request of any protocol is one `Call`; every call passes one table of
gates; a station answers what it asks of a model. A fast path only accepts: what is not plainly
ordinary goes to the general path, which has the last word.
"""

THREADS = """All state of requests and models belongs to the event loop. A thread is given a call
and hands its result back with `call_soon_threadsafe`; it touches nothing else.
"""

LIMITS = """Read from `Settings` and from what the composition root passes on. What each means, its
unit and its default are in `settings.md`.
"""

TOUR = """## Where a change goes
"""

LIVES: tuple[Life, ...] = ()

WORKERS: tuple[Worker, ...] = (
    Worker(
        "cli/serve.py: _run",
        "the event loop",
        "reads and writes sockets, decides, executes models that are quick",
        "everything but what is below",
        "-",
    ),
    Worker(
        "core/threads/host.py: HostThreads._wake_one",
        "`execute_N`",
        "computes on the host, in turns between models; large JSON, compression and images too",
        "the inputs that it was given, and the model",
        "`HostThreads._heard` on the loop",
    ),
    Worker(
        "core/threads/workers.py: Workers.__init__",
        "`load_N`, `finish_N`, `compile_N`, `disk_N`",
        "loads models; compiles what loads leave, and shapes on demand; waits for the disk",
        "files, JAX, the model that it makes",
        "a future that the loop waits for, within a limit of time",
    ),
    Worker(
        "core/threads/limited.py: LimitedThreads._fill",
        "one thread for each limited call",
        "runs one call, and is abandoned when that makes no progress",
        "as above",
        "as above",
    ),
    Worker(
        "core/threads/workers.py: Workers.device",
        "the threads of a device",
        "made when the first model asks for them",
        "see the next row",
        "see the next row",
    ),
    Worker(
        "core/threads/device.py: DeviceThreads.__init__",
        "`dispatch D`, `fetch D`",
        "one gives the device its work, in order; one waits for what it computes",
        "the inputs, the program, the outputs",
        "from the first to the second, then to the loop",
    ),
    Worker(
        "core/threads/joining.py: ended",
        "unnamed",
        "ends a pool, so that the end of the server can bound its wait",
        "the pool",
        "its own end",
    ),
    Worker(
        "core/residence/predictions.py: FilesLook.__init__",
        "`predict`",
        "looks at files to predict what a model will take",
        "files",
        "a future",
    ),
    Worker(
        "models/trial.py: try_loading",
        "a process",
        "tries a model whose files a client has sent, before the server loads it",
        "the files, nothing of the server",
        "its exit status",
    ),
    Worker(
        "transport/grpc/compression.py: decompress",
        "asyncio's threads",
        "inflates a large message",
        "the message",
        "a future",
    ),
    Worker(
        "models/targets/compiling.py: Compilers.__init__",
        "one thread for each process below",
        "waits for a process that compiles",
        "its pipes",
        "a future",
    ),
    Worker(
        "models/targets/compiling.py: _Lane._start",
        "processes of `xlaserve plan`",
        "compile for devices that are not there",
        "files of models, and a cache directory",
        "a line of JSON on its standard output",
    ),
    Worker("cli/bench.py: bench", "the loop of `xlaserve bench`", "loads a server", "sockets", "-"),
    Worker("cli/health.py: health", "the loop of `xlaserve health`", "asks once", "a socket", "-"),
    Worker("cli/infer.py: infer", "the loop of `xlaserve infer`", "asks once", "a socket", "-"),
)
