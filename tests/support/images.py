"""Parses deploy/Dockerfile into instructions per stage."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = ROOT / "deploy/Dockerfile"
_CONTINUED = re.compile(r"\\\n\s*")


def instructions() -> Iterator[tuple[str, str]]:
    """Yield instructions and arguments, without comments and with continued lines joined."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if line[:1] != "#")
    for line in _CONTINUED.sub("", text).splitlines():
        if line.strip():
            name, _, argument = line.partition(" ")
            yield name, argument.strip()


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, including those of the stages it builds on."""
    found: dict[str, list[tuple[str, str]]] = {}
    stage = ""
    for name, argument in instructions():
        if name == "FROM":
            base, _, stage = argument.partition(" AS ")
            found[stage] = list(found.get(base, ()))
        else:
            found[stage].append((name, argument))
    return found


def of(name: str, stage: str = "sagemaker") -> list[str]:
    """Return the arguments of all instructions with this name in a stage, in order."""
    return [argument for found, argument in stages()[stage] if found == name]
