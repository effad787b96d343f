"""The compared servers: how each is started, checked and stopped."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from comparison import python_models
from comparison.kit import Kit
from xlaserve.dialing.over_grpc import Client
from xlaserve.errors import XlaserveError
from xlaserve.tensors import DATATYPES, TensorSpec

OURS = "xlaserve"
"""The variant to which the targets apply."""

NO_POLLING = ("--busy-poll-seconds", "0")
"""Flags for measuring CPU time: polling for a slow client would count as well."""

START_SECONDS = 120.0
STOP_SECONDS = 20.0
_RETRY_SECONDS = 0.2
_MAX_MESSAGE_BYTES = 2 * 64 * 2**20
_READY = {"identity": (1, 16), "mlp": (1, 784), "image": (1, 3, 224, 224)}
"""Models that must answer before a server counts as ready, with their input shapes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to start xlaserve."""

    name: str
    flags: tuple[str, ...] = ()


def default_variants() -> list[Variant]:
    """Return the default xlaserve and, if HTTP/2 engines can be chosen, a variant with h2."""
    variants = [Variant(OURS)]
    shown = subprocess.run(
        [sys.executable, "-m", "xlaserve.cli", "serve", "--help"],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "--http2-engine" in shown.stdout:
        variants.append(Variant(f"{OURS} over h2", ("--http2-engine", "h2")))
    return variants


def without_polling(name: str) -> str:
    """Return the name of the contender that runs a variant of xlaserve without polling."""
    return f"{name} without polling"


def with_processes(name: str, count: int) -> str:
    """Return the name of the contender that runs a variant of xlaserve on all cores."""
    return f"{name} as {count} on all cores"


def parse_variant(text: str) -> Variant:
    """Read `NAME=FLAGS`."""
    name, _, flags = text.partition("=")
    return Variant(name, tuple(shlex.split(flags)))


def with_python(name: str) -> str:
    """Return the name of the contender that runs the same server with Python models."""
    return f"{name} with Python"


async def ask_models(client: Client) -> None:
    """Return once the models of the comparison have answered; raises an XlaserveError otherwise."""
    fp32 = DATATYPES["FP32"]
    for model, shape in _READY.items():
        tensor = np.zeros(shape, np.float32)
        await client.infer(model, "", [(TensorSpec("x", fp32, shape), tensor)])


@dataclass(slots=True)
class Contender:
    """A server that is started on demand."""

    name: str
    command: list[str]
    environment: dict[str, str]
    grpc_port: int
    http_port: int
    log: Path
    ask: Callable[[Client], Awaitable[None]] = ask_models
    """Raises an XlaserveError unless the server is ready."""
    deaths: int = 0
    """Number of unexpected exits."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """Return the process id; raises RuntimeError if the server was not started."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    def start(self) -> None:
        """Start the server unless it is running; it may not be ready yet."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self.deaths += 1
            self.stop()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return once the models answer; exits if they do not in time."""
        end = time.monotonic() + START_SECONDS
        while not asyncio.run(self._answers()):
            gone = self._process is None or self._process.poll() is not None
            if gone or time.monotonic() > end:
                sys.exit(f"{self.name} {'ended' if gone else 'is not ready'}, see {self.log}")
            time.sleep(_RETRY_SECONDS)

    async def _answers(self) -> bool:
        try:
            async with Client(f"127.0.0.1:{self.grpc_port}", timeout=START_SECONDS) as client:
                await self.ask(client)
        except XlaserveError:
            return False
        return True

    def stop(self) -> None:
        """Stop the server and all of its descendants."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Contenders:
    """All servers of a comparison; a context manager that ends them."""

    def __init__(self, kit: Kit, models: Path, logs: Path) -> None:
        self._kit, self._models, self._logs = kit, models, logs
        self._all: dict[str, Contender] = {}
        self._ours: set[str] = set()
        self._verified: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def add_peer(self, name: str) -> None:
        """Add a server of the kit."""
        grpc, http = free_port(), free_port()
        command = [str(self._kit.start_script(name)), str(grpc), str(http)]
        self._add(name, command, self._kit.environment, (grpc, http))

    def add_variant(self, variant: Variant) -> None:
        """Add xlaserve; numeric libraries get one thread each, as for the kit's peers."""
        self._ours.add(variant.name)
        self._add(variant.name, *self._serve(self._models, variant.flags))

    def add_processes(self, variant: Variant, count: int) -> None:
        """Add xlaserve with several processes, on the cores of server and client."""
        name = with_processes(variant.name, count)
        flags = (*variant.flags, "--processes", str(count))
        self._ours.add(name)
        self._add(name, *self._serve(self._models, flags, cpus=self._kit.all_cpus))

    def add_python(self, name: str, repository: Path) -> None:
        """Add xlaserve or Triton with a repository of Python models."""
        if name == OURS:
            command, environment, ports = self._serve(repository, ("--allow-python-models",))
        else:
            ports = free_port(), free_port()
            command = python_models.triton_command(self._kit, repository, ports)
            environment = python_models.triton_environment(self._kit)
        self._add(with_python(name), command, environment, ports)
        self._all[with_python(name)].ask = python_models.ask
        self._verified.add(with_python(name))  # its readiness check verifies an answer

    def _serve(
        self, models: Path, flags: tuple[str, ...], *, cpus: str = ""
    ) -> tuple[list[str], dict[str, str], tuple[int, int]]:
        grpc, http = free_port(), free_port()
        command = ["taskset", "-c", cpus or self._kit.server_cpu]
        command += [
            sys.executable,
            "-m",
            "xlaserve.cli",
            "serve",
            str(models),
            "--device",
            "cpu",
            "--no-background-compile",
        ]
        command += ["--grpc-endpoint", f"port:{grpc}", "--http-endpoint", f"port:{http}"]
        command += ["--max-message-bytes", str(_MAX_MESSAGE_BYTES), *flags]
        single = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        return command, os.environ | single, (grpc, http)

    def _add(
        self, name: str, command: list[str], environment: dict[str, str], ports: tuple[int, int]
    ) -> None:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        self._all[name] = Contender(name, command, environment, *ports, log)

    def running(self, names: list[str], *, fresh: bool = False) -> list[Contender]:
        """Return ready contenders; `fresh` restarts them, so that they have served nothing else."""
        wanted = [self._all[name] for name in names]
        for one in wanted:
            if fresh:
                one.stop()
            one.start()
        for one in wanted:
            one.wait()
            self._verify(one)
        return wanted

    def _verify(self, contender: Contender) -> None:
        """Exit if answers are wrong: such a server is not comparable.

        Only xlaserve is also checked over HTTP: some peers reject the JSON body of the kit's
        client.
        """
        if contender.name in self._verified:
            return
        http = contender.http_port if contender.name in self._ours else None
        wrong = self._kit.verify(contender.grpc_port, http)
        if wrong:
            sys.exit(f"{contender.name} answers wrongly:\n{wrong}")
        self._verified.add(contender.name)

    def stop(self) -> None:
        """Stop all servers."""
        for one in self._all.values():
            one.stop()


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
