"""The help of `xlaserve serve`, in a layout for many options."""

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

from xlaserve.cli.serve.triton_flags import translate
from xlaserve.settings.description import SettingDescription, describe_settings
from xlaserve.settings.reading import successor

_NO_BREAK = "\N{NO-BREAK SPACE}"

WITHOUT_EFFECT = "xlaserve.without_effect"
"""Key in the command's context for tritonserver flags without effect."""

CONFIG_HELP = "TOML settings file; the environment and flags override it."

OPEN_HELP = "Open the status page in a browser once the server has started."

POSITIONAL = "repository"
"""The setting that is a positional argument."""


def flags(setting: SettingDescription) -> str:
    """Return an option's spelling, in typer's syntax."""
    flag = _flag(setting.name)
    return f"{flag}/--no-{flag[2:]}" if setting.switch else flag


def _replaced(args: Sequence[str]) -> str:
    """Return the replacement of a removed flag, or an empty string."""
    for flag in itertools.takewhile(lambda one: one != "--", args):
        name = flag.partition("=")[0]
        plain = name.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name.startswith("--") and (took_place := successor(plain, _flag)):
            return f"{name}: expected {took_place}"
    return ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def help_lines(settings: Sequence[SettingDescription], width: int) -> Iterator[str]:
    """Yield a heading for each group, and each option followed by its description."""
    for group, rows in itertools.groupby(settings, key=lambda setting: setting.group):
        yield ""
        yield f"{group or 'Arguments'}:"
        yield from itertools.chain.from_iterable(_option(row, width) for row in rows)


def _option(setting: SettingDescription, width: int) -> Iterable[str]:
    name = "[REPOSITORY]" if setting.name == POSITIONAL else flags(setting)
    value = "" if setting.switch or setting.name == POSITIONAL else " VALUE"
    default = f" {_whole(f'[default: {setting.default}]')}" if setting.default else ""
    variable = _whole(f"[env: {setting.variable}]")
    indent = " " * 6
    lines = textwrap.wrap(
        f"{setting.text}{default} {variable}",
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"  {name}{value}", *(line.replace(_NO_BREAK, " ") for line in lines)]


def _whole(text: str) -> str:
    return text.replace(" ", _NO_BREAK)


class ServeCommand(TyperCommand):
    """Formats help from the settings, and accepts flags of tritonserver."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line; flags without effect are kept in the context for the log."""
        if replaced := _replaced(args):
            ctx.fail(replaced)
        translation = translate(args)
        rest = super().parse_args(ctx, list(translation.arguments))
        ctx.meta[WITHOUT_EFFECT] = translation.without_effect
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, purpose and every option."""
        formatter.write(f"{self.get_usage(ctx)}\n\n  {self.help}\n")
        formatter.write(f"  --config FILE\n      {CONFIG_HELP}\n")
        formatter.write(f"  --open\n      {OPEN_HELP}\n")
        for line in help_lines(describe_settings(), formatter.width):
            formatter.write(f"{line}\n")
        formatter.write("\n  tritonserver flags are also accepted: docs/moving.md.\n")
        formatter.write("\nHelp:\n  --help\n      Show this message and exit.\n")
