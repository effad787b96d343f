"""Row independence of exported and imported models: its output and its option."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from xlaserve.artifact.manifest import Manifest

Independence: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--batch-independent/--batch-dependent",
        help="Declare that rows of a batch do not depend on one another; by default this is"
        " proved.",
    ),
]
"""Option that declares whether the rows of a batch are independent."""


def rows_shown(described: Manifest, notices: Sequence[str]) -> Sequence[str]:
    """Return the result of the row independence proof, or why requests are not batched."""
    if notices or described.verdict is None:
        return notices
    return [f"rows are {described.verdict}"]
