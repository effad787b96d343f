"""The table of commands: help texts without imports, and the imports of each command."""

import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from xlaserve.cli import application
from xlaserve.cli.commands import COMMANDS, loaded

_LIGHT = {
    "xlaserve",
    "xlaserve.build",
    "xlaserve.cli",
    "xlaserve.cli.commands",
    "xlaserve.errors",
    "xlaserve.process",
    "xlaserve.process.best_effort",
}
"""Modules that the first words of a command line may import."""
_HEAVY = {"jax", "numpy", "grpclib", "betterproto", "aiohttp", "structlog", "uvloop"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says_of_itself(name: str) -> None:
    row, command = COMMANDS[name], loaded(name)

    assert command.name == name
    assert command.get_short_help_str(200) == row.text
    assert command.rich_help_panel == row.panel


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["infr"], ["completion", "fish"]])
def test_a_command_that_nobody_asked_for_is_not_imported(arguments: list[str]) -> None:
    script = (
        "import contextlib, sys; from xlaserve.cli import main\n"
        f"sys.argv = ['xlaserve', *{arguments}]\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    imported = set(ended.stdout.split("\n")[-2].split())

    asked = {f"xlaserve.cli.{arguments[0]}"} & {"xlaserve.cli.completion"}
    # Importing typer takes longer than all else for the version.
    reader = {"xlaserve.cli.commands"} if arguments == ["--version"] else set()
    assert {one for one in imported if one.split(".")[0] == "xlaserve"} == (_LIGHT - reader) | asked
    assert ("typer" in imported) is not bool(reader)
    assert not imported & _HEAVY


def test_help_is_that_of_the_command() -> None:
    told = CliRunner().invoke(application(), ["models", "load", "--help"]).output

    assert "Names of the models." in told


def test_a_mistyped_command_is_answered_by_the_one_that_was_meant() -> None:
    result = CliRunner().invoke(application(), ["modelz"])

    assert result.exit_code == 2
    assert "'models'" in result.output


def test_every_command_is_listed() -> None:
    listed = get_command(application())

    assert list(getattr(listed, "commands")) == list(COMMANDS)  # noqa: B009, typer has two classes
