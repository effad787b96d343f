"""The trace file: a JSON array, complete after each write, as Triton's tools read it."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Trace: TypeAlias = Sequence[Mapping[str, Any]]
"""The objects of one request: its description and its times."""


class TraceFile:
    """Writes traces to a file, or to numbered files. For one thread at a time; it blocks.

    Raises OSError where nothing can be written.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        """Most bytes of all files together."""
        self._written = 0
        self._bytes: dict[Path, int] = {}
        """Bytes of each file that this process has begun."""
        self._index = 0

    def write(self, traces: Sequence[Trace], each: int) -> bool:
        """Write traces, `each` to a file with a number behind its name; 0 for all to one file.

        Return false, and leave the rest out, where they would take more than they may.
        """
        if not each:
            return self._append(self._path, traces)
        for start in range(0, len(traces), each):
            path = self._path.with_name(f"{self._path.name}.{self._index}")
            if not self._append(path, traces[start : start + each]):
                return False
            self._index += 1
        return True

    def _append(self, path: Path, traces: Sequence[Trace]) -> bool:
        text = ",".join(json.dumps(part) for trace in traces for part in trace)
        data = text.encode()
        begun = path in self._bytes
        if self._written + len(data) + 2 > self._max_bytes:
            return False
        try:
            with path.open("r+b" if begun else "wb") as file:
                if begun:
                    file.seek(self._bytes[path] - 1)  # over the bracket at its end
                file.write((b"," if begun else b"[") + data + b"]")
                after = file.tell()
        except OSError:
            self._restore(path)
            raise
        self._written += after - self._bytes.get(path, 0)
        self._bytes[path] = after
        return True

    def _restore(self, path: Path) -> None:
        """Have a file end as before a write that failed: with a full disk half of it may be there.

        The bracket is written over a byte that the file has, which takes no space.
        """
        size = self._bytes.get(path, 0)
        with suppress(OSError), path.open("r+b", buffering=0) as file:
            file.truncate(size)
            if size:
                file.seek(size - 1)
                file.write(b"]")
