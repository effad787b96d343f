"""The bench kit with the peers: its location, checks for missing parts, and one repetition."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Repetition: TypeAlias = dict[str, Any]
"""`rps`, `p50`, `p99` and more from one run of h2load, or `error`."""

PEERS = ("floor", "triton", "mlserver", "kserve")
_PROGRAMS = {"h2load": "nghttp2-client", "curl": "curl", "taskset": "util-linux"}
_OVERHEAD_SECONDS = 150.0
"""Time allowed for the probe that precedes a repetition, in addition to the repetition itself."""


@dataclass(frozen=True, slots=True)
class Kit:
    """A checkout of the kit, and the directory into which its setup installed the peers."""

    directory: Path
    cache: Path
    server_cpu: str
    client_cpu: str

    @property
    def all_cpus(self) -> str:
        """Return the cores of servers and clients, in taskset's format."""
        return f"{self.server_cpu},{self.client_cpu}"

    def check(self, peers: tuple[str, ...]) -> None:
        """Exit with instructions if the kit, a program or a peer is missing."""
        if not (self.directory / "bench.sh").exists():
            sys.exit(
                f"{self.directory}: no bench kit there. It is not part of this repository; "
                "--bench-kit says where it is. `xlaserve bench` measures without it."
            )
        for program, package in _PROGRAMS.items():
            if shutil.which(program) is None:
                sys.exit(f"{program} is not installed (Debian: {package})")
        for name in ("tools", *peers):
            if not (self.cache / "venv" / name / "bin" / "python").exists():
                sys.exit(
                    f"{self.cache}: {name} is not set up, run "
                    f"PEERS_CACHE={self.cache} {self.directory}/setup.sh"
                )

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the kit's scripts, without our PYTHONPATH."""
        return {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PEERS_CACHE": str(self.cache),
            "CPUS": self.server_cpu,
        }

    def body(self, workload: str) -> Path:
        """Return the file with a workload's gRPC message; write all of them first if missing."""
        path = self.cache / "bodies" / f"{workload}.grpc"
        if not path.exists():
            python = self.cache / "venv" / "tools" / "bin" / "python"
            script = self.directory / "gen_bodies.py"
            subprocess.run([python, script, path.parent], check=True, env=self.environment)
        return path

    def start_script(self, peer: str) -> Path:
        """Return the script that starts a peer; it takes the gRPC and HTTP ports."""
        return self.directory / f"start_{peer}.sh"

    def verify(self, grpc_port: int, http_port: int | None) -> str:
        """Compare answers with numpy; return the kit's message if one is wrong, else ''."""
        python = self.cache / "venv" / "tools" / "bin" / "python"
        command = [str(python), str(self.directory / "verify.py")]
        command += ["--grpc", f"127.0.0.1:{grpc_port}"]
        if http_port is not None:
            command += ["--http", f"127.0.0.1:{http_port}"]
        ran = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return "" if not ran.returncode else ran.stdout + ran.stderr

    @contextmanager
    def on_client_cpu(self) -> Iterator[None]:
        """Pin this process to the client's core for the duration of a block."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {int(cpu) for cpu in self.client_cpu.split(",")})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def measure(
        self,
        port: int,
        pid: int,
        *,
        protocol: str,
        workload: str,
        load: str,
        seconds: float,
        everywhere: bool = False,
    ) -> Repetition:
        """Run h2load once against a server, with the kit's options; `everywhere` uses all cores."""
        out = self.cache / "run" / f"compare-{os.getpid()}.jsonl"
        out.unlink(missing_ok=True)
        self.body(workload)
        command = [str(self.directory / "bench.sh"), "compared", str(port), protocol]
        flags = {
            "wl": workload,
            "conc": load,
            "reps": "1",
            "retries": "0",
            "dur": str(seconds),
            "warm": "0.5",
            "client-cpu": self.all_cpus if everywhere else self.client_cpu,
            "server-pid": str(pid),
            "out": str(out),
        }
        command += [part for name, value in flags.items() for part in (f"--{name}", value)]
        try:
            ran = subprocess.run(
                command,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=seconds + _OVERHEAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": "no end in time"}
        if not out.exists():
            return {"error": ran.stderr[-400:]}
        record: Repetition = json.loads(out.read_text().splitlines()[-1])
        out.unlink()
        if "error" in record:
            return {"error": record["error"]}
        repetition: Repetition = record["reps"][0]
        if repetition.get("failed"):
            return {"error": f"{repetition['failed']} requests failed"}
        return repetition
