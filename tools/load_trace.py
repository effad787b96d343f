"""Find what blocks a server while a model loads: long callbacks and holds of the GIL.

    python tools/load_trace.py [--loads 8] [--compile-processes 1]

A server in this process loads and unloads encoders (those of load_latency.py). Meanwhile a thread
wakes every 0.2 ms. If it wakes late without having waited for a core, another thread held the GIL:
the one that used the most CPU time meanwhile. That time is recorded as the hold, with the thread's
stack, so other processes on the machine do not count. The output ends with the CPU times of the
event loop's callbacks. Linux only.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from load_latency import export_models
from turns import timed
from xlaserve.app.server import prepare
from xlaserve.settings import Settings

LEAST_MS = 0.5
"""Shortest hold or loop iteration to report, in milliseconds."""
_NAP_SECONDS = 0.0002
_SHOWN_FRAMES = 3


class Holds:
    """Records which thread held the GIL for how long, within a `watching` block."""

    def __init__(self) -> None:
        self.found: defaultdict[str, list[float]] = defaultdict(list)
        """Place -> milliseconds of CPU time of each hold."""
        self._ended = threading.Event()
        self._used: dict[int, float] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the duration of a block."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        delay = _delay_ms(schedule)
        while not self._ended.is_set():
            due = time.perf_counter() + _NAP_SECONDS
            time.sleep(_NAP_SECONDS)
            late_ms = 1000 * (time.perf_counter() - due)
            before, delay = delay, _delay_ms(schedule)
            thread, used_ms = self._busiest()
            hold_ms = min(late_ms - (delay - before), used_ms)
            if hold_ms > LEAST_MS:
                frame = sys._current_frames().get(thread)
                name = next((t.name for t in threading.enumerate() if t.ident == thread), "?")
                self.found[f"{name.rstrip('0123456789_')}: {_place(frame)}"].append(hold_ms)

    def _busiest(self) -> tuple[int, float]:
        """Return the thread with the most CPU time since the last call, and its milliseconds."""
        used = {}
        for thread in threading.enumerate():
            if thread.ident is not None and thread is not threading.current_thread():
                with suppress(OSError):  # the thread has ended
                    clock = time.pthread_getcpuclockid(thread.ident)
                    used[thread.ident] = 1000 * time.clock_gettime(clock)
        grown = {one: ms - self._used.get(one, ms) for one, ms in used.items()}
        self._used = used
        busiest = max(grown, key=lambda one: grown[one])
        return busiest, grown[busiest]


def _delay_ms(schedule: Path) -> float:
    """Return how long a thread has waited for a core, in total."""
    return int(schedule.read_text().split()[1]) / 1e6


def _place(frame: FrameType | None) -> str:
    """Return the innermost frames, at least up to one of the server."""
    shown: list[str] = []
    while frame is not None and len(shown) < 24:
        code = frame.f_code
        shown.append(f"{Path(code.co_filename).stem}.{code.co_qualname}:{frame.f_lineno}")
        if len(shown) >= _SHOWN_FRAMES and "xlaserve" in code.co_filename:
            break
        frame = frame.f_back
    return " < ".join(shown[:2] + shown[-2:] if len(shown) > 4 else shown)


async def _trace(root: Path, models: list[str], loads: int, processes: int) -> None:
    settings = Settings.read(
        {},
        repository=root,
        grpc_endpoint="port:0",
        device="cpu",
        load_model=("asked",),
        model_control_mode="explicit",
        compilation_cache_directory="none",
        background_compile=False,
        compile_processes=processes,
    )
    turns: list[float] = []
    long: Counter[str] = Counter()
    application = prepare(settings)
    async with application.running():
        await application.load()
        # The first load also imports modules.
        await application.control.load(models[0])
        await application.control.unload(models[0])
        holds = Holds()
        begun = time.process_time()
        with holds.watching(), timed(turns, long, LEAST_MS):
            for number in range(loads):
                model = models[number % len(models)]
                await application.control.load(model)
                await application.control.unload(model)
        seconds = time.process_time() - begun
    print(f"{loads} loads, {1000 * seconds / loads:.0f} ms of processor time each")
    print(f"holds of {LEAST_MS} ms and more: count, sum and longest in ms")
    for place, found in sorted(holds.found.items(), key=lambda item: -sum(item[1]))[:40]:
        print(f"{len(found):6} {sum(found):8.1f} {max(found):7.1f}  {place}")
    print(f"turns: {len(turns)}, longest {max(turns):.1f} ms; those of {LEAST_MS} ms and more:")
    for callback, count in long.most_common():
        print(f"{count:6} {callback}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=8)
    parser.add_argument("--compile-processes", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        written = export_models(Path(folder))
        asyncio.run(_trace(Path(folder), written, given.loads, given.compile_processes))
