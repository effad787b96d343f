"""`xlaserve serve`: a command with a flag for each setting."""

import faulthandler
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
import uvloop
from rich.console import Console

from xlaserve.cli.serve.help import CONFIG_HELP, OPEN_HELP, POSITIONAL, WITHOUT_EFFECT, flags
from xlaserve.cli.serve.settings_file import merged
from xlaserve.errors import XlaserveError
from xlaserve.process import own_code, signals
from xlaserve.process.best_effort import best_effort
from xlaserve.process.output import logged_output
from xlaserve.process.systemd import Systemd
from xlaserve.settings import Settings
from xlaserve.settings.description import SettingDescription, describe_settings

_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)],
)
_OPEN = inspect.Parameter(
    "open_page",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--open", help=OPEN_HELP)],
)
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def command() -> Callable[..., None]:
    """Return the command function with one parameter for each setting, for typer to inspect."""

    def serve(
        *, context: typer.Context, config: Path | None, open_page: bool, **values: Any
    ) -> None:
        given = {name: value for name, value in values.items() if value not in (None, [])}
        settings = merged(config, given)
        if open_page:
            from xlaserve.cli.serve import page

            page.check(settings)
        _serve(settings, context.meta.get(WITHOUT_EFFECT, ()), opens_page=open_page)

    parameters = [
        _CONTEXT,
        _CONFIG,
        _OPEN,
        *(_parameter(setting) for setting in describe_settings()),
    ]
    serve.__doc__ = "Serve the models of a repository until interrupted."
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def _parameter(setting: SettingDescription) -> inspect.Parameter:
    kind: Any = bool if setting.switch else list[str] if setting.many else str
    option = (
        typer.Argument(show_default=False)
        if setting.name == POSITIONAL
        else typer.Option(flags(setting), help=setting.text, show_default=False)
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _serve(settings: Settings, without_effect: Sequence[str], *, opens_page: bool) -> None:
    in_terminal = best_effort(sys.stdout).isatty() and best_effort(sys.stderr).isatty()
    level = settings.log_level
    if level == "auto":
        # Several processes have no terminal display, only the log.
        level = "warning" if in_terminal and settings.processes == 1 else "info"
    with logged_output(level):
        left = _serve_logged(
            settings, level, without_effect, in_terminal=in_terminal, opens_page=opens_page
        )
    if left:
        # The interpreter would wait for threads that never end, or shut down while they run.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(0)


def _serve_logged(
    settings: Settings,
    level: str,
    without_effect: Sequence[str],
    *,
    in_terminal: bool,
    opens_page: bool,
) -> bool:
    """Serve until stopped; tell whether threads are left that never end."""
    own_code.keep()
    signals.ignore()
    # A crash dump bypasses the queue of the log.
    faulthandler.enable(sys.stderr)
    if without_effect:
        structlog.get_logger("serve").warning(
            "tritonserver flags without effect", flags=list(without_effect)
        )
    try:
        if settings.processes == 1:
            return _run(settings, in_terminal=in_terminal, opens_page=opens_page)
        _run_several(replace(settings, log_level=level))
    except* XlaserveError as group:
        raise group.exceptions[0] from None
    except* OSError:
        structlog.get_logger("serve").exception("the server failed")
        raise
    return False


def _run_several(settings: Settings) -> None:
    # Do not import the core: the parent process only holds the ports.
    from xlaserve.app.replacing import without_repositories_away
    from xlaserve.workers.parent import run

    systemd = Systemd.of(os.environ)
    uvloop.run(run(without_repositories_away(settings, systemd), systemd))


def _run(settings: Settings, *, in_terminal: bool, opens_page: bool) -> bool:
    # Import these only here, since they would slow down the other commands.
    from xlaserve.app.display import Display, NoDisplay
    from xlaserve.app.replacing import without_repositories_away
    from xlaserve.app.server import run
    from xlaserve.cli.display import TerminalDisplay
    from xlaserve.cli.serve import page

    systemd = Systemd.of(os.environ)
    settings = without_repositories_away(settings, systemd)
    with ExitStack() as stack:
        display: Display = NoDisplay()
        if in_terminal:
            console = Console(file=best_effort(sys.stdout))
            display = stack.enter_context(TerminalDisplay(console))
        if opens_page:
            display = page.PageOpener(display, is_tls=page.is_tls(settings))
        return uvloop.run(run(settings, display, systemd))
