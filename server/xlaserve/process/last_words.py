"""Logs the end of a child process, with its last output."""

import signal

import structlog

MAX_BYTES = 4096
"""Length of the output that is kept: its end, where a traceback names the error."""

_log = structlog.get_logger("child")


def how(status: int) -> str:
    """Return the signal or the exit status that ended a process, as text."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def last_line(output: bytes | str | None) -> str:
    """Return the last line that a process printed, or an empty string if there is none."""
    lines = _text(output).splitlines()
    return lines[-1].strip() if lines else ""


def tell(process: str, ended: str, output: bytes | str | None, model: str = "") -> None:
    """Log the unexpected end of a process, with the last part of its stderr."""
    about = {"model": model} if model else {}
    _log.warning("process ended", process=process, reason=ended, last_output=_text(output), **about)


def _text(output: bytes | str | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return text.strip()[-MAX_BYTES:]
