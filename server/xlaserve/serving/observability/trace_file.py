"""The trace file in Triton's format: a JSON array that is complete after each write."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Trace: TypeAlias = Sequence[Mapping[str, Any]]
"""The JSON objects of one request: its description and its timestamps."""


class TraceFile:
    """Writes traces to one file or to numbered files. Blocks; use from one thread at a time.

    Methods raise OSError if nothing can be written.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        """Maximum size of all files together."""
        self._written = 0
        self._bytes: dict[Path, int] = {}
        """Size of each file that this process has created."""
        self._index = 0

    def write(self, traces: Sequence[Trace], each: int) -> bool:
        """Write traces: `each` per numbered file, or all to one file if `each` is 0.

        Return False, and skip the remaining traces, if they would exceed the size limit.
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
                    file.seek(self._bytes[path] - 1)  # overwrite the closing bracket
                file.write((b"," if begun else b"[") + data + b"]")
                after = file.tell()
        except OSError:
            self._restore(path)
            raise
        self._written += after - self._bytes.get(path, 0)
        self._bytes[path] = after
        return True

    def _restore(self, path: Path) -> None:
        """Restore a file after a failed write, which may have left partial data on a full disk.

        The closing bracket overwrites an existing byte, which needs no disk space.
        """
        size = self._bytes.get(path, 0)
        with suppress(OSError), path.open("r+b", buffering=0) as file:
            file.truncate(size)
            if size:
                file.seek(size - 1)
                file.write(b"]")
