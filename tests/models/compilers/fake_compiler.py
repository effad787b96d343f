"""A fake compiler process that misbehaves as the model name of a job says."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_MB = 1 << 20


def main(notes: Path) -> None:  # noqa: C901, PLR0912, a case for each misbehaviour
    """Process jobs as `compilers.child` does."""
    kept: list[bytearray] = []
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    for line in sys.stdin.buffer:
        job = json.loads(line)
        artifact = sys.stdin.buffer.read(job["artifact_bytes"])
        lines = _noted(notes, job["model"], len(artifact))
        data = b"program of " + job["computation"].encode()
        said: dict[str, Any] = {
            "program": job["program"],
            "environment": job["environment"],
            "executable_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        match job["model"]:
            case "dies":
                _abort()
            case "dies once" if lines == 1:
                _abort()
            case "hangs":
                time.sleep(1000)
            case "pair":
                while len({json.loads(one)["pid"] for one in notes.read_text().splitlines()}) < 2:
                    time.sleep(0.005)
            case "flips a bit":
                data = bytes([data[0] ^ 1, *data[1:]])
            case "is cut":
                out.write(json.dumps(said).encode() + b"\n" + data[:3])
                out.flush()
                os._exit(0)
            case "talks":
                out.write(b"hello\n")
            case "other program":
                said["program"] = {"computation": "other"}
            case "other jaxlib":
                said["environment"] = {"jaxlib": "2"}
            case "refuses":
                said, data = {"refused": "it does as it likes"}, b""
            case "fails":
                said, data = {"error": "RESOURCE_EXHAUSTED: too much"}, b""
            case "takes 100 MB":
                kept.append(bytearray(b"x" * (100 * _MB)))
                time.sleep(1000)
            case "keeps 100 MB":
                kept.append(bytearray(b"x" * (100 * _MB)))
        out.write(json.dumps(said).encode() + b"\n" + data)
        out.flush()


def _noted(notes: Path, model: str, artifact: int) -> int:
    """Record a job, and return the number of jobs so far."""
    line = json.dumps({"pid": os.getpid(), "model": model, "artifact": artifact})
    # A single write: two processes may write concurrently.
    descriptor = os.open(notes, _FLAGS)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)
    return len(notes.read_text().splitlines())


def _abort() -> None:
    print("F0000 no such register", file=sys.stderr, flush=True)
    os.abort()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
