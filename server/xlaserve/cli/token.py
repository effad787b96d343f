"""`xlaserve token`: creates a token, and the line with its digest for the access rules."""

import json
from typing import Annotated

import typer

from xlaserve.serving.access.tokens import digest_of, new_token


def token(
    name: Annotated[
        str, typer.Option(help="Name of the caller; prints a complete [[caller]] entry to edit.")
    ] = "",
) -> None:
    """Create a token for the access rules (docs/access.md).

    The first line is the token, a secret of its owner. The other lines are for the access rules
    file and are not secret: the digest does not reveal a token of 256 random bits.
    """
    made = new_token()
    typer.echo(made)
    entry = f'[[caller]]\nname = {json.dumps(name)}\nallow = ["infer"]\n' if name else ""
    typer.echo(f'{entry}token = "{digest_of(made)}"')
