"""M2 and D2: all disturbances at once, and a server that is killed repeatedly."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import hashlib
import json
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
from support import hoarders
from support.floods import ATTACKS
from support.hoarders import Hoarder, push
from support.victim import infer_request
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from acceptance.asking import infer_message
from acceptance.bystanders import Sight, bystanders
from acceptance.figures import MIB, Outcome, percentile
from acceptance.subjects import WIDTH, Launch, Subject, export_models, export_plus

_QUIET_SECONDS = 8.0
_SETTLE_SECONDS = 20.0
_BEHIND_SECONDS = 1.0
"""Seconds after a restart within which a failed request still counts as caused by the outage: the
client may have connected before it.
"""
_DISK_BYTES = 4 * MIB
_EXPECTED = frozenset({"NOT_FOUND", "UNAVAILABLE", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"})
"""Statuses expected of loads and unloads, which race with each other and a full disk."""
_PAUSE_SECONDS = 0.05
_FLOODS = ("PING", "requests that are cancelled at once", "empty DATA", "SETTINGS", "PRIORITY")


@dataclass
class _Stage:
    """State shared by all sources of chaos."""

    launch: Launch
    subject: Subject
    random: Random
    is_over: threading.Event = field(default_factory=threading.Event)
    is_down: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    """Wall-clock time from each SIGKILL until the server had restarted."""

    def count(self, what: str) -> None:
        """Increment a counter, from any thread."""
        with self.lock:
            self.counts[what] += 1

    def outlived(self, began: float) -> bool:
        """Tell whether the server has run without a restart since then."""
        return not self.is_down.is_set() and not any(end >= began for _, end in self.outages)


def chaos(
    folder: Path, *, seconds: float = 3600, kill_every: float = 60, timed: bool = True
) -> Outcome:
    """Load, reload, flood, read slowly, disconnect, fill the disk, and kill the server once a
    minute.

    Bystanders in a separate process send requests meanwhile. With `timed` their latency is compared
    with that of clients of a second, undisturbed server, which runs at the same time because a busy
    machine slows both.
    """
    export_models(folder / "models")
    export_models(folder / "calm" / "models")
    export_plus(folder / "models", "changing", 3)
    outcome = Outcome()
    with _small_disk(folder / "scratch") as is_small:
        flags = {"scratch_directory": folder / "scratch", "max_held_bytes": 256 * MIB}
        launch, beside = Launch(folder, flags), Launch(folder / "calm", {})
        try:
            subject, calm = launch.start(), beside.start()
            stage = _Stage(launch, subject, Random("chaos"))
            with (
                bystanders(subject.grpc, subject.http) as sight,
                bystanders(calm.grpc, calm.http) as others,
            ):
                time.sleep(_QUIET_SECONDS)
                began = time.time()
                _make(stage, seconds, kill_every)
                ended = time.time()
                # Without chaos: let the requests in flight finish.
                time.sleep(1)
            outcome.note("disk", f"of {_DISK_BYTES / MIB:g} MiB" if is_small else "not limited")
            _judge(stage, (sight, others), (began, ended), outcome, timed=timed)
            _judge_end(stage, outcome)
            outcome.at_most("status of the exit", abs(launch.stop()), 0)
        finally:
            for process in filter(None, (launch.process, beside.process)):
                process.kill()
                process.wait()
    return outcome


@contextmanager
def _small_disk(path: Path) -> Iterator[bool]:
    """Mount a small file system where permitted; yield whether it was mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(path)]
    is_small = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield is_small
    finally:
        if is_small:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


def _make(stage: _Stage, seconds: float, kill_every: float) -> None:
    makers: Sequence[Callable[[_Stage, Random], None]] = (
        _load,
        _reload,
        _fill_disk,
        _cancel,
        _vanish,
        _read_slowly,
        _flood,
    )
    threads = [
        threading.Thread(target=_repeat, args=(stage, maker, Random(maker.__name__)), daemon=True)
        for maker in makers
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, kill_every * stage.random.uniform(0.5, 1.5)))
            if end - time.monotonic() > 0:
                _kill(stage)
    finally:
        stage.is_over.set()
        for thread in threads:
            thread.join(60)


def _kill(stage: _Stage) -> None:
    stage.is_down.set()
    began = time.time()
    stage.launch.kill()
    stage.subject = stage.launch.start()
    stage.outages.append((began, time.time()))
    stage.is_down.clear()
    stage.count("SIGKILL")


def _repeat(stage: _Stage, maker: Callable[[_Stage, Random], None], random: Random) -> None:
    while not stage.is_over.is_set():
        began = time.time()
        if stage.is_down.is_set():
            stage.is_over.wait(_PAUSE_SECONDS)
            continue
        try:
            maker(stage, random)
        except grpc.RpcError as error:
            status = error.code().name
            stage.count(f"{maker.__name__[1:]}: {status}")
            if status not in _EXPECTED and stage.outlived(began):
                stage.unexpected.append(f"{maker.__name__[1:]}: {status} {error.details()}"[:300])
        except OSError as error:
            stage.count(f"{maker.__name__[1:]}: {type(error).__name__}")
        else:
            stage.count(maker.__name__[1:])
        stage.is_over.wait(random.uniform(0.05, 0.5))


# --- Sources of chaos --------------------------------------------------------------------------


@contextmanager
def _stub(stage: _Stage) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(stage.subject.grpc, options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def _load(stage: _Stage, random: Random) -> None:
    with _stub(stage) as stub:
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="changing"), timeout=60)
        stub.RepositoryModelUnload(
            pb.RepositoryModelUnloadRequest(model_name="changing"), timeout=60
        )


def _reload(stage: _Stage, random: Random) -> None:
    """Reload the models that serve the bystanders."""
    name = random.choice(("plus", "echo", "texts"))
    with _stub(stage) as stub:
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=60)


def _fill_disk(stage: _Stage, random: Random) -> None:
    """Send more files with a load than the disk can hold."""
    request = pb.RepositoryModelLoadRequest(model_name="sent")
    request.parameters["config"].string_param = json.dumps({"backend": "onnxruntime"})
    request.parameters["file:1/model.onnx"].bytes_param = bytes(2 * _DISK_BYTES)
    with _stub(stage) as stub:
        try:
            stub.RepositoryModelLoad(request, timeout=60)
        except grpc.RpcError as error:
            if "No space left" in str(error.details()):
                stage.count("refusals for want of disk")
            raise


def _cancel(stage: _Stage, random: Random) -> None:
    import numpy as np

    with _stub(stage) as stub:
        calls = [
            stub.ModelInfer.future(
                infer_message("plus", np.ones((1, WIDTH), np.float32)), timeout=30
            )
            for _ in range(20)
        ]
        time.sleep(random.uniform(0, 0.003))
        for call in calls:
            call.cancel()


def _vanish(stage: _Stage, random: Random) -> None:
    """Disconnect at a random byte of a message."""
    whole = hoarders.grpc_opening(1 << 20)
    whole += hoarders.grpc_requests(infer_request("echo", WIDTH), range(1, 41, 2))
    http = hoarders.http_request("echo", 1000) + bytes(1000)
    for url, octets in ((stage.subject.grpc, whole), (stage.subject.http, http)):
        hoarder = Hoarder(url, octets[: random.randrange(1, len(octets))])
        hoarder.send()
        hoarder.close()


def _read_slowly(stage: _Stage, random: Random) -> None:
    """Request 30 MiB and read none of it."""
    octets = hoarders.grpc_opening(0)
    octets += hoarders.grpc_requests(infer_request("wide", 1), range(1, 7, 2))
    hoarder = Hoarder(stage.subject.grpc, octets)
    push([hoarder])
    stage.is_over.wait(random.uniform(0, 2))
    hoarder.close()


def _flood(stage: _Stage, random: Random) -> None:
    ATTACKS[random.choice(_FLOODS)].run(stage.subject.grpc)
    stage.is_over.wait(random.uniform(1, 3))


# --- Judgement ---------------------------------------------------------------------------------


def _judge(
    stage: _Stage,
    sights: tuple[Sight, Sight],
    span: tuple[float, float],
    outcome: Outcome,
    *,
    timed: bool,
) -> None:
    sight, others = sights
    outcome.note("length", f"{span[1] - span[0]:.0f} s")
    outcome.note("what there was", dict(sorted(stage.counts.items())))
    outcome.note("requests of bystanders", sight.asked)
    outcome.none("wrong answers", sight.wrong)
    lost = [
        text
        for began, ended, text in sight.failed
        if not any(
            began <= start + _BEHIND_SECONDS and ended >= down for down, start in stage.outages
        )
    ]
    outcome.note("in flight at a SIGKILL, or before the start", len(sight.failed) - len(lost))
    outcome.none("lost otherwise", lost)
    outcome.none("unexpected ends of loads and others", stage.unexpected)
    before = percentile([seconds for began, seconds in sight.latencies if began < span[0]], 99)

    def counts(began: float) -> bool:
        starting = any(down <= began <= start + 1 for down, start in stage.outages)
        return span[0] <= began <= span[1] and not starting

    def during(seen: Sight) -> float:
        return percentile([seconds for began, seconds in seen.latencies if counts(began)], 99)

    p99, calm = during(sight), during(others)
    if timed:
        times = round(p99 / max(calm, 1e-6), 1)
        outcome.at_most("p99, in times of a server without chaos", times, 3)
    shown = f"{before * 1e3:.1f}, {p99 * 1e3:.1f} and {calm * 1e3:.1f} ms"
    outcome.note("p99, before chaos, in it, and without it beside", shown)


def _judge_end(stage: _Stage, outcome: Outcome) -> None:
    """Require that no request is in progress after a grace period and that the server runs."""
    subject = stage.subject
    end = time.monotonic() + _SETTLE_SECONDS
    while (left := _left(subject)) and time.monotonic() < end:
        time.sleep(0.2)
    outcome.none("requests in progress behind it", left)
    resident = subject.held_bytes() / MIB
    outcome.note("memory at the end", f"{resident:.0f} MiB")
    outcome.add("server", subject.is_running, "runs", holds=subject.is_running)


def _left(subject: Subject) -> list[str]:
    with urllib.request.urlopen(f"http://{subject.http}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return [
        line
        for line in lines
        if line.startswith("xlaserve_requests_in_progress") and not line.endswith((" 0", " 0.0"))
    ]


# --- D2: repeated kills ------------------------------------------------------------------------


def kills(folder: Path, *, count: int = 100) -> Outcome:
    """Kill a server at any moment of loads, overrides and unloads, and start it again each time."""
    models, scratch = folder / "models", folder / "scratch"
    export_plus(models, "plus", 1, rows=1)
    export_plus(models, "changing", 3, rows=1)
    scratch.mkdir()
    before, outcome, random = _digest(models), Outcome(), Random("kills")
    launch = Launch(folder, {"scratch_directory": scratch, "load_model": "plus"})
    wrong, left = list[str](), list[str]()
    try:
        stage = _Stage(launch, launch.start(), random)
        for _ in range(count):
            threads = [
                threading.Thread(
                    target=_repeat, args=(stage, maker, Random(random.random())), daemon=True
                )
                for maker in (_load, _override)
            ]
            stage.is_over.clear()
            for thread in threads:
                thread.start()
            time.sleep(random.uniform(0, 0.7))
            stage.is_over.set()
            stage.is_down.set()
            _kill(stage)
            for thread in threads:
                thread.join(60)
            left += [
                path.name for path in scratch.iterdir() if path.stat().st_mtime < _begun(stage)
            ]
            wrong += _index(stage)
    finally:
        launch.stop()
    outcome.note("what there was", dict(sorted(stage.counts.items())))
    outcome.at_least("kills", stage.counts["SIGKILL"], count)
    outcome.add("repository", "", "unchanged", holds=_digest(models) == before)
    outcome.none("directories left behind by the dead", left)
    outcome.none("wrong entries of the index", wrong)
    outcome.none("unexpected ends", stage.unexpected)
    return outcome


def _begun(stage: _Stage) -> float:
    return stage.outages[-1][0]


def _override(stage: _Stage, random: Random) -> None:
    """Load a model whose files are part of the request."""
    source = stage.launch.folder / "models" / "changing" / "1"
    request = pb.RepositoryModelLoadRequest(model_name="sent")
    request.parameters["config"].string_param = json.dumps({"max_batch_size": 1})
    for path in source.iterdir():
        request.parameters[f"file:1/{path.name}"].bytes_param = path.read_bytes()
    with _stub(stage) as stub:
        stub.RepositoryModelLoad(request, timeout=60)
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="sent"), timeout=60)


def _index(stage: _Stage) -> list[str]:
    with _stub(stage) as stub:
        answer = stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=60)
    found = {row.name: row.state for row in answer.models}
    expected = {"plus": "READY", "changing": "UNAVAILABLE"}
    states = {name: state or "UNAVAILABLE" for name, state in found.items()}
    return [] if states == expected else [str(found)]


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        digest.update(str(path.relative_to(root)).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
