"""Shows the row independence of an exported or imported model, and lets commands declare it."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from xlaserve.artifact.manifest import Manifest

Independence: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--batch-independent/--batch-dependent",
        help="Whether each row of a batch is computed from itself alone; else what is proved.",
    ),
]
"""The option of a command that declares something about rows."""


def rows_shown(described: Manifest, notices: Sequence[str]) -> Sequence[str]:
    """Return the proof of rows as lines, or why requests are not batched."""
    if notices or described.verdict is None:
        return notices
    return [f"rows are {described.verdict}"]
