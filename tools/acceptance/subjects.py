"""Servers under test, each in a separate process, and their models."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from support import identity_models, python_models
from support.process import ENVIRONMENT, START_SECONDS, STOP_SECONDS, command
from support.resident import Resident

import xlaserve

WIDTH = 16
"""Elements per row of the models' tensors."""
PLUS = 1.0
"""The number that `plus` adds."""
WIDE_BYTES = 10 << 20


def export_models(root: Path) -> None:
    """Write `echo` and `texts`, which return their inputs; `plus`, an XLA program; and `wide`,
    which expands a number to 10 MiB.
    """
    identity_models.write(root, "echo", "FP32")
    identity_models.write(root, "texts", "BYTES")
    export_plus(root, "plus", PLUS)
    xlaserve.export_model(
        lambda params, x: {"y": x + params["w"]},
        {"w": np.ones((1, WIDE_BYTES // 4), np.float32)},
        {"x": ("FP32", [1, 1])},
        root / "wide" / "1",
    )


def export_plus(root: Path, name: str, amount: float, version: str = "1", rows: int = 4) -> None:
    """Write a version of a model that adds a number, stored as a parameter, to each element."""
    xlaserve.export_model(
        lambda params, x: {"y": x + params["amount"]},
        {"amount": np.full((1, WIDTH), amount, np.float32)},
        {"x": ("FP32", [-1, WIDTH])},
        root / name / version,
        max_batch_size=rows,
    )


SPOILERS = {
    "leaks": "import builtins\nkept = builtins.__dict__.setdefault('_kept', [])\n"
    "kept.append(bytearray(b'x' * 100_000))\nreturn {'y': x}",
    "hangs": "import time\ntime.sleep(3600)",
    "is wrong": "return {'y': x + 1}",
}
"""Bodies of models with the defects that detectors must find."""


def spoil(root: Path, how: str) -> None:
    """Replace `echo` with a defective model."""
    (root / "echo" / "config.json").unlink()
    python_models.write_function(root, "echo", SPOILERS[how])


def write_leaking_load(root: Path, name: str) -> None:
    """Write a model that leaks 100 kB per load."""
    code = """
    import builtins

    class Model(PythonModel):
        def load(self, context):
            kept = builtins.__dict__.setdefault("_kept", [])
            kept.append(bytearray(b"x" * 100_000))

        def infer(self, inputs):
            return {"y": inputs["x"]}
    """
    python_models.write(root, name, code, python_models.VECTORS)


@dataclass(frozen=True)
class Subject(Resident):
    """A server under test, in a separate process."""

    grpc: str
    http: str

    @property
    def is_running(self) -> bool:
        """Tell whether its process is running."""
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    def held_bytes(self) -> int:
        """Return the memory of the process and its children."""
        return int(self.process.memory_info().rss) + sum(map(sum, self.of_children().values()))

    def of_children(self) -> dict[str, list[int]]:
        """Return each child's memory, by the module it runs."""
        found: dict[str, list[int]] = {}
        for child in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # the process has exited meanwhile
                held = int(child.memory_info().rss)
                found.setdefault(_module(child.cmdline()), []).append(held)
        return found

    def open_files(self) -> int:
        """Return the number of open file descriptors."""
        return int(self.process.num_fds())

    def threads(self) -> int:
        """Return the number of threads."""
        return int(self.process.num_threads())


def _module(arguments: Sequence[str]) -> str:
    """Return what a Python command runs: the argument of `-m`, or the name of the script."""
    if "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1]
    scripts = (Path(one).stem for one in arguments if one.endswith(".py"))
    return next(scripts, "another program")


@dataclass
class Launch:
    """A server that can be started, killed, and restarted at the same addresses."""

    folder: Path
    """Contains `models` and the log, to which each start appends."""
    flags: Mapping[str, object]
    process: "subprocess.Popen[bytes] | None" = None
    addresses: Mapping[str, str] | None = None
    starts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    @property
    def log(self) -> Path:
        """Return the path of the log."""
        return self.folder / f"log-{self.starts}"

    def start(self) -> Subject:
        """Start the server, and return once its models are loaded."""
        self.begin()
        return self.started()

    def begin(self) -> None:
        """Start the process without waiting for it."""
        self.starts += 1
        given = {"model_control_mode": "explicit", "load_model": "*"} | dict(self.flags)
        flags = [flag for name, value in given.items() for flag in _flag(name, value)]
        known = self.addresses or {"grpc": ":0", "http": ":0"}
        ports = {name: f"port:{url.rpartition(':')[2]}" for name, url in known.items()}
        arguments = [*command("serve", str(self.folder / "models")), "--device", "cpu"]
        arguments += ["--grpc-endpoint", ports["grpc"], "--http-endpoint", ports["http"]]
        with self.log.open("w") as written:
            self.process = subprocess.Popen(
                [*arguments, *flags],
                stderr=written,
                env={**os.environ, **ENVIRONMENT, **self.variables},
            )

    def started(self) -> Subject:
        """Return once the models are loaded; raises AssertionError if they fail to."""
        assert self.process is not None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            events = self.events()
            if "started" in events and "listening" in events:
                self.addresses = {name: events["listening"][name] for name in ("grpc", "http")}
                process = psutil.Process(self.process.pid)
                return Subject(process, self.addresses["grpc"], self.addresses["http"])
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log.read_text()[-2000:]}")

    def events(self) -> dict[str, dict[str, str]]:
        """Return the last log record of each event since this start."""
        found: dict[str, dict[str, str]] = {}
        for line in self.log.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                # An engine does not listen to clients.
                if record.get("event") != "listening" or record.get("http"):
                    found[str(record.get("event"))] = record
        return found

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop the server with SIGTERM and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list | tuple):
        return [text for one in value for text in (flag, str(one))]
    return [flag, str(value)]


@contextmanager
def serving(folder: Path, **flags: object) -> Iterator[Subject]:
    """Serve `folder/models` for the duration of a block; clients may load and unload."""
    has_code = any((folder / "models").glob("*/*/model.py"))
    launch = Launch(folder, ({"allow_python_models": True} if has_code else {}) | flags)
    try:
        yield launch.start()
    finally:
        if launch.process is not None:
            launch.stop()
