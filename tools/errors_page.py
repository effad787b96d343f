"""Write docs/errors.md from the errors and statuses, or prove it fresh (`--check`)."""

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from grpclib.const import Status

from xlaserve import errors
from xlaserve.errors import XlaserveError
from xlaserve.errors import access as access_errors
from xlaserve.errors import code as code_errors
from xlaserve.errors import language as language_errors
from xlaserve.errors import sequence as sequence_errors
from xlaserve.net.status import REACTIONS, STATUSES, wire_status

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
_MODULES = (errors, sequence_errors, language_errors, access_errors, code_errors)
_INTRODUCTION = """# Errors

An error names the model, the tensor, what was expected and what came. Over gRPC its text is
`grpc-message`, over REST `{"error": "..."}`. Any other failure is the server's own
fault: INTERNAL or 500 without a reason, and a traceback in the log. An error without a row of its
own in the server's table has the statuses of the one that it is a kind of.

This page is made by `tools/errors_page.py`.
"""
_TABLE = """
## {title}

| error | gRPC | HTTP | meaning |
|---|---|---|---|
"""
_REACTIONS = """
## 503, 429 and others: when to retry

A mesh, a proxy and a client that retries decide by the status. A request that had begun and took
its process with it is INTERNAL: sent again, it would end one process after another. Every status
that is not in this table is told to the client, and nothing is sent again.

| gRPC | HTTP | says of the request | ModelMesh | clients that retry | errors |
|---|---|---|---|---|---|
"""
_TITLES = {
    "errors": "Errors of the server",
    "sequence": "Errors of sequences",
    "language": "Errors of the text of language models",
    "access": "Errors of callers",
    "code": "Errors of the code of Python models",
}


def page() -> str:
    """Return the whole page."""
    return _INTRODUCTION + _reactions() + "".join(map(_table, _MODULES))


def _reactions() -> str:
    return _REACTIONS + "".join(
        f"| {status.name} | {_http_of(status)} | {one.tells} | {one.mesh} | {one.clients} "
        f"| {', '.join(_named(status))} |\n"
        for status, one in REACTIONS.items()
    )


def _named(status: Status) -> list[str]:
    """Return the errors with a status."""
    return [
        error.__name__
        for module in _MODULES
        for error in _errors(module)
        if wire_status(error.__new__(error)).grpc is status
    ]


def _http_of(status: Status) -> str:
    found = {int(row.http) for row in STATUSES.values() if row.grpc is status}
    return ", ".join(map(str, sorted(found)))


def _table(module: ModuleType) -> str:
    title = _TITLES[module.__name__.rpartition(".")[2]]
    return _TABLE.format(title=title) + "".join(map(_row, _errors(module)))


def _errors(module: ModuleType) -> Iterator[type[XlaserveError]]:
    """Yield a module's error classes in source order; the root has no status."""
    for found in vars(module).values():
        if (
            inspect.isclass(found)
            and issubclass(found, XlaserveError)
            and found is not XlaserveError
            and found.__module__ == module.__name__
        ):
            yield found


def _row(error: type[XlaserveError]) -> str:
    status = wire_status(error.__new__(error))
    (meaning, *_) = inspect.cleandoc(error.__doc__ or "").split("\n\n")
    text = " ".join(meaning.split()).replace("|", "\\|")
    return f"| {error.__name__} | {status.grpc.name} | {int(status.http)} | {text} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        print("docs/errors.md is fresh")
        return 0
    print("docs/errors.md is stale: run tools/errors_page.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
