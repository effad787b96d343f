"""`xlaserve token`: makes a token, and the line of the rules with its digest."""

import json
from typing import Annotated

import typer

from xlaserve.serving.access.tokens import digest_of, new_token


def token(
    name: Annotated[
        str, typer.Option(help="Name of the caller: show its whole entry, to be completed.")
    ] = "",
) -> None:
    """Make a token for the file of access rules (docs/access.md).

    The first line is the token, for its owner alone. The rest is for the file, and no secret: a
    token of 256 random bits is not found from its digest.
    """
    made = new_token()
    typer.echo(made)
    entry = f'[[caller]]\nname = {json.dumps(name)}\nallow = ["infer"]\n' if name else ""
    typer.echo(f'{entry}token = "{digest_of(made)}"')
