"""`xlaserve events`: prints or follows the event log of a server."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from xlaserve.cli.asking.connection import Reach, ask_server, reaching
from xlaserve.cli.printable import printable
from xlaserve.dialing.interface import CallFailed, Json
from xlaserve.dialing.over_rest import RestClient
from xlaserve.errors import InvalidRequest

_ASK_SECONDS = 30.0
_NANOSECONDS = 10**9
_URL = "http://127.0.0.1:8000"


@reaching(_ASK_SECONDS, _URL)
def events(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    reach: Reach,
    model: Annotated[str, typer.Option(help="Only events of this model.")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only failures.")] = False,
    search: Annotated[str, typer.Option(help="Only events that contain this text.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep printing new events until interrupted.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.05, help="Seconds between polls with --follow.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Show a server's loads, unloads and failures, and who asked for them."""
    if not reach.address.rest:
        raise InvalidRequest(
            f"--url: expected the HTTP endpoint, such as {_URL}, which serves the events"
        )
    query = {"model": model, "failed": str(failed).lower(), "search": search}
    try:
        ask_server(_show(reach, query, interval if follow else None, as_json=as_json))
    except KeyboardInterrupt:
        return


async def _show(
    reach: Reach, query: dict[str, str], interval: float | None, *, as_json: bool
) -> None:
    log, last = "", 0
    async with RestClient(reach.address, timeout=reach.timeout) as client:
        while True:
            path = f"/page/events?{urlencode(query | {'after': str(last)})}"
            found = _read(reach, await client.text(path))
            if log and found["log"] != log:  # a restarted server counts from 1
                log, last = "", 0
                continue
            if missing := found["matching"] - len(found["events"]):
                typer.echo(f"{missing} older events omitted", err=True)
            for event in reversed(found["events"]):
                typer.echo(json.dumps(event) if as_json else event_line(event))
            log, last = found["log"], found["last"]
            if interval is None:
                return
            await asyncio.sleep(interval)


def _read(reach: Reach, text: str) -> Json:
    try:
        found = json.loads(text)
        return {key: found[key] for key in ("log", "last", "matching", "events")}
    except (ValueError, KeyError, TypeError) as error:
        raise CallFailed(
            reach.address.url, "no event log found: this is not an xlaserve server"
        ) from error


def event_line(event: Json) -> str:
    """Format an event as one line: time, event, model, reason, and caller."""
    at = datetime.fromtimestamp(event["at_ns"] // _NANOSECONDS, UTC)
    version = f" version {event['version']}" if event.get("version") else ""
    what = f"{event.get('model') or event.get('subject') or ''}{version}"
    parts = [
        f"{at:%Y-%m-%dT%H:%M:%SZ}",
        "FAILED" if event.get("failed") else "ok",
        event["kind"],
        what,
        *([f"for {event['for_model']}"] if event.get("for_model") else ()),
        *([f"({_asker(event)})"] if _asker(event) else ()),
    ]
    text = f": {event['text']}" if event.get("text") else ""
    return printable(" ".join(filter(None, parts)) + text)


def _asker(event: Json) -> str:
    asker: dict[str, Any] = event.get("asker") or {}
    parts = (
        asker.get("principal") or "",
        f"from {asker['peer']}" if asker.get("peer") else "",
        f"by {asker['protocol']}" if asker.get("protocol") else "",
    )
    return " ".join(filter(None, parts)) or str(event.get("cause") or "")
