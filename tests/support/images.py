"""The instructions of deploy/Dockerfile, by stage."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = ROOT / "deploy/Dockerfile"
_CONTINUED = re.compile(r"\\\n\s*")


def instructions() -> Iterator[tuple[str, str]]:
    """Yield instruction and argument, comments left out and lines joined."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if line[:1] != "#")
    for line in _CONTINUED.sub("", text).splitlines():
        if line.strip():
            name, _, argument = line.partition(" ")
            yield name, argument.strip()


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage with those of the stages below it, by name."""
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
    """Return the arguments of an instruction in a stage, in order."""
    return [argument for found, argument in stages()[stage] if found == name]
