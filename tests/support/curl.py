"""Runs curl as the examples in the documentation do."""

from collections.abc import Sequence

from support.http import Answer
from support.process import run_bytes
from support.tools import program


async def curl(*arguments: str) -> Answer:
    """Run `curl -i` and return the last response."""
    code, out, err = await run_bytes(
        program("curl"), "--silent", "--show-error", "--include", *arguments
    )
    assert not code, err.decode()
    return _last(out)


def _last(out: bytes) -> Answer:
    # Skip 100 Continue and redirects.
    while True:
        head, _, rest = out.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        if status >= 200:
            return Answer(status, dict(_headers(lines[1:])), rest)
        out = rest


def _headers(lines: Sequence[str]) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in lines)
    return [(name.lower(), value.strip()) for name, _, value in pairs]
