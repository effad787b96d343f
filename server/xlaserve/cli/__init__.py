"""The command line: `xlaserve serve | infer | bench | export | import | health | repo`."""

import sys

import typer

from xlaserve.cli import bench, export, health, import_onnx, infer, repo, serve
from xlaserve.errors import XlaserveError

_FAILED = 1


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and exit status 1."""
    application = typer.Typer(
        name="xlaserve",
        help="Serve JAX models over the V2 (Open Inference) protocol.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    application.command("serve")(serve.command())
    application.command("infer")(infer.infer)
    application.command("bench")(bench.bench)
    application.command("export")(export.export)
    application.command("import")(import_onnx.import_onnx)
    application.command("health")(health.health)
    application.add_typer(repo.repo(), name="repo")
    try:
        application()
    except XlaserveError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(_FAILED)
