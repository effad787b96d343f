"""Findings as a table for people, and as JSON for the file kept in docs."""

import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_check.device import Device
from gpu_check.findings import Finding, Verdict

_STYLES = {Verdict.PASSED: "green", Verdict.FAILED: "bold red", Verdict.UNKNOWN: "yellow"}
_VERSIONS = ("xlaserve", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "libtpu")


def show(device: Device, found: Sequence[Finding]) -> None:
    """Print the table and a summary line."""
    console = Console()
    memory = f", {device.limit_bytes} bytes of memory" if device.limit_bytes else ""
    table = Table(title=f"{device.count} x {device.kind} ({device.platform}){memory}")
    for column in ("check", "subject", "verdict"):
        table.add_column(column)
    table.add_column("found", overflow="fold")
    for row in found:
        verdict = Text(row.verdict, _STYLES.get(row.verdict, ""))
        table.add_row(row.check, row.subject, verdict, Text(row.said))
    console.print(table)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in _counts(found).items()))


def append(path: Path, check: str, row: Finding) -> None:
    """Append one finding to a file, in the format of `tools/device`."""
    values = dict(row.values)
    if row.verdict is Verdict.FAILED:
        values["FAILED"] = row.said
    name = f"{row.check} {row.subject}".strip()
    said = {"step": f"check_{check}", "name": name, "verdict": row.verdict, "said": row.said}
    with path.open("a") as file:
        file.write(json.dumps({**said, **values}, default=repr) + "\n")


def as_json(device: Device, found: Sequence[Finding], seconds: float) -> str:
    """Return all findings as JSON, with the versions and the device."""
    whole = {
        "device": {
            "platform": device.platform,
            "kind": device.kind,
            "count": device.count,
            "limit_bytes": device.limit_bytes,
        },
        "versions": _versions(),
        "seconds": round(seconds, 1),
        "verdicts": _counts(found),
        "findings": [
            {
                "check": row.check,
                "subject": row.subject,
                "verdict": row.verdict,
                "said": row.said,
                "values": dict(row.values),
            }
            for row in found
        ],
    }
    return json.dumps(whole, indent=1)


def _counts(found: Sequence[Finding]) -> dict[str, int]:
    counted = Counter(row.verdict.value for row in found)
    return {verdict.value: counted[verdict.value] for verdict in Verdict}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
