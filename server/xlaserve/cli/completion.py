"""`xlaserve completion`: prints the completion script of a shell."""

from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

_PROGRAM = "xlaserve"
_VARIABLE = "_XLASERVE_COMPLETE"


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion script of a shell, for `eval "$(xlaserve completion bash)"`."""
    typer.echo(get_completion_script(prog_name=_PROGRAM, complete_var=_VARIABLE, shell=shell.value))
