"""R1 and R2: random batched programs; what is proved of one must hold when it runs.

Results are stored as one line of JSON per program; an interrupted run can be continued.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from acceptance.figures import Outcome

_PROCESS = Path(__file__).with_name("row_programs_process.py")
_OF_ONE_PROCESS = 120
"""Programs per process; after so many it occupies some hundred megabytes."""
_PATIENCE_SECONDS = 900.0
"""Timeout for one line of a process's output; each program has a much lower limit of its own."""

Line: TypeAlias = Mapping[str, Any]
"""Result of one program: for each output whether it is proved, why not, and which other rows it was
observed to depend on.
"""


def judge(
    folder: Path,
    *,
    family: str,
    programs: int = 5000,
    first: int = 0,
    processes: int = 0,
    most_percent: float = 10.0,
    results: Path | None = None,
) -> Outcome:
    """Prove the outputs of `programs` random programs, starting at seed `first`, and try each
    program.

    The trial of `moves` uses numpy. Others use the reference interpreter of StableHLO, which
    computes a row in the same way at every batch size, and one in ten XLA. `results` names a
    directory that keeps the results.
    """
    kept = results or folder
    kept.mkdir(parents=True, exist_ok=True)
    path = kept / f"{family}.jsonl"
    if path.exists() and not path.read_text().endswith("\n"):
        # End a truncated line, so that the next result starts a new one.
        with path.open("a") as file:
            file.write("\n")
    seeds = range(first, first + programs)
    found = _read(path)
    _judge([seed for seed in seeds if seed not in found], family, path, found, processes)
    outcome = Outcome()
    _conclude([found[seed] for seed in seeds], most_percent, outcome)
    return outcome


def _judge(
    seeds: Sequence[int], family: str, path: Path, found: dict[int, Line], processes: int
) -> None:
    lock, chunks = threading.Lock(), queue.SimpleQueue[Sequence[int]]()
    for begin in range(0, len(seeds), _OF_ONE_PROCESS):
        chunks.put(seeds[begin : begin + _OF_ONE_PROCESS])

    def work() -> None:
        while True:
            try:
                chunk = chunks.get_nowait()
            except queue.Empty:
                return
            for line in _lines(family, chunk):
                with lock, path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                    found[line["seed"]] = line

    threads = [threading.Thread(target=work) for _ in range(processes or os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read(path: Path) -> dict[int, Line]:
    """Return the results of an earlier run; a truncated last line is skipped."""
    found: dict[int, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["seed"]] = line
    return found


def _conclude(lines: Sequence[Line], most_percent: float, outcome: Outcome) -> None:
    outputs = [(line["seed"], *output) for line in lines for output in line.get("outputs", ())]
    wrong = [f"{seed}: {seen}" for seed, is_proved, _, seen in outputs if is_proved and seen]
    independent = [(is_proved, reason) for _, is_proved, reason, seen in outputs if not seen]
    refused = [reason for is_proved, reason in independent if not is_proved]
    ended = [f"{line['seed']}: {line['ended']}" for line in lines if "ended" in line]
    outcome.note("programs", sum("outputs" in line for line in lines))
    outcome.note("programs that are not exported", sum("unexported" in line for line in lines))
    outcome.note("programs that XLA compiled", sum(bool(line.get("compiled")) for line in lines))
    outcome.none("programs that were not judged", ended)
    outcome.note("outputs", len(outputs))
    outcome.at_least("outputs that are proved", sum(is_proved for _, is_proved, *_ in outputs), 1)
    outcome.none("outputs that are proved and depend on more than their row", wrong)
    outcome.at_most(
        f"refused of {len(independent)} outputs that no trial saw depend on more",
        round(100 * len(refused) / max(len(independent), 1), 2),
        most_percent,
        " %",
    )
    outcome.note("reasons", dict(Counter(refused).most_common(12)))


def _lines(family: str, seeds: Sequence[int]) -> Iterator[Line]:
    """Yield the result of each program, starting a new process after a crash."""
    left = list(seeds)
    is_compiled = False
    while left:
        done = 0
        for line in _of_process(family, left, is_compiled=is_compiled):
            if "outputs" not in line and "unexported" not in line and not is_compiled:
                # Try again with XLA: the interpreter aborts its process on an unsupported
                # operation.
                is_compiled = True
                break
            yield line
            done += 1
            if is_compiled:
                is_compiled = False
                break
        left = left[done:]


def _of_process(family: str, seeds: Sequence[int], *, is_compiled: bool) -> Iterator[Line]:
    how = "compiled" if is_compiled else "interpreted"
    process = subprocess.Popen(
        [sys.executable, str(_PROCESS), family, how, *map(str, seeds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            said.put(line)
        said.put("")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for seed in seeds:
            try:
                line = said.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                yield {"seed": seed, "ended": f"says nothing in {_PATIENCE_SECONDS:g} s"}
                return
            if not line:
                yield {"seed": seed, "ended": f"ends with {process.wait()}"}
                return
            yield json.loads(line)
    finally:
        process.kill()
        process.wait()
        reader.join()
        output.close()
