"""Command line: device, duration of measurements, and the JSON output."""

import argparse
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_check import report
from gpu_check.cached import check_cached
from gpu_check.device import Device, Options
from gpu_check.findings import Check, Finding, Verdict, judged
from gpu_check.memory import check_memory
from gpu_check.models import check_models
from gpu_check.overlap import check_overlap
from gpu_check.serving import check_serving
from xlaserve.artifact.manifest import FILE_NAME
from xlaserve.errors import DeviceUnavailable
from xlaserve.process import log

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"

CHECKS: dict[str, Check] = {
    "models": check_models,
    "overlap": check_overlap,
    "cached": check_cached,
    "serving": check_serving,
    # Last, so that its leftovers disturb no other check.
    "memory": check_memory,
}
"""All checks, in execution order. A new one is a row here and a module."""

_SECONDS = 1.0
_QUICK_SECONDS = 0.01
_WIDE = 1 << 24
"""Columns of an input that takes milliseconds to copy: 64 MiB of FP32."""

_QUICK_WIDE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a device; return 1 if a check failed. Without a device, say why and return 0."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    paths = sorted(path.parent for path in asked.repository.glob(f"*/*/{FILE_NAME}"))
    if not paths:
        parser.error(f"there are no models in {asked.repository}")
    started = time.monotonic()
    log.configure("warning")
    try:
        device = Device.started(asked.device)
    except DeviceUnavailable as error:
        print(f"no device: {error}")
        return 0
    options = Options(
        tuple(paths[:1] if asked.quick else paths),
        _QUICK_SECONDS if asked.quick else _SECONDS,
        _QUICK_WIDE if asked.quick else _WIDE,
    )
    found: list[Finding] = []
    for name in asked.only.split(",") if asked.only else CHECKS:
        for one in checked(CHECKS[name], name, device, options):
            found.append(one)
            # Immediately, so that an interrupted run keeps its findings.
            if asked.lines:
                report.append(asked.lines, name, one)
            if asked.json:
                seconds = time.monotonic() - started
                asked.json.write_text(report.as_json(device, found, seconds) + "\n")
    report.show(device, found)
    return int(any(row.verdict is Verdict.FAILED for row in found))


def checked(check: Check, name: str, device: Device, options: Options) -> Iterator[Finding]:
    """Yield a check's findings; an exception becomes a failure, so that the others still run."""
    try:
        yield from check(device, options)
    # Errors on untried devices are unpredictable: report them with the other findings.
    except Exception as error:
        traceback.print_exc()
        yield judged(name, "", False, f"{type(error).__name__}: {error}"[:500])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Check what only a device can say. Takes some ten minutes."
    )
    parser.add_argument("repository", nargs="?", type=Path, default=EXAMPLES)
    parser.add_argument("--device", choices=("cuda", "tpu", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    parser.add_argument("--lines", type=Path, help="append each finding to this file, in a line")
    parser.add_argument("--only", default="", help=f"some of {','.join(CHECKS)}")
    parser.add_argument("--quick", action="store_true", help="one model, and no time for speeds")
    return parser
