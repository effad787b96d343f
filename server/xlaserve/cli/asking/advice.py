"""Failed calls for a model, with advice on the next command to run."""

import difflib
from collections.abc import Awaitable
from typing import TypeVar

from xlaserve.cli.printable import printable
from xlaserve.dialing.interface import CallFailed, ServerClient

T = TypeVar("T")

_READY = "READY"


async def advised(client: ServerClient, model: str, asking: Awaitable[T]) -> T:
    """Await a call for a model; raises CallFailed, with advice if there is any."""
    try:
        return await asking
    except Exception as error:
        failure = _failure(client, error)
        if failure is None:
            raise
        advice = await _advice(client, model, failure)
        if not advice:
            raise failure from error
        problem = f"{failure.problem.rstrip('.')}; {advice}"
        raise CallFailed(failure.url, problem, failure.status) from error


def _failure(client: ServerClient, error: Exception) -> CallFailed | None:
    return error if isinstance(error, CallFailed) else client.failure(error)


async def _advice(client: ServerClient, model: str, failure: CallFailed) -> str:
    """Return advice based on the model's entry in the server's index, or an empty string."""
    if failure.status not in {"NOT_FOUND", "INVALID_ARGUMENT", "UNAVAILABLE", "UNKNOWN"}:
        return ""
    try:
        entries = await client.index()
    except Exception as error:
        if _failure(client, error) is None:
            raise
        return ""
    states = [entry.state for entry in entries if entry.name == model]
    if states:
        loadable = _READY not in states
        return f"to load it: xlaserve models load {printable(model)}" if loadable else ""
    names = sorted({entry.name for entry in entries})
    near = difflib.get_close_matches(model, names, n=3)
    if near:
        return f"did you mean {' or '.join(printable(repr(name)) for name in near)}?"
    return "to see its models: xlaserve models list"
