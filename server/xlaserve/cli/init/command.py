"""`xlaserve init`: creates a repository with a model, a settings file and a client."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from xlaserve.cli.author_errors import reported_in_one_line
from xlaserve.cli.init import sources
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import InvalidRequest
from xlaserve.residence.repository.names import check_name

_EXAMPLE = "example"
_MODEL = '''"""A JAX function of parameters and inputs, which `xlaserve export` writes as a model.

xlaserve export model.py:model models/example --overwrite
"""

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve import Exportable


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return two numbers for each row of three."""
    return jnp.tanh(x @ params["w"] + params["b"][None])


params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
model = Exportable(predict, params, {"x": ("FP32", [-1, 3])}, outputs=["y"], max_batch_size=16)
'''
_SETTINGS = """# Read by `xlaserve serve --config xlaserve.toml`; docs/settings.md has the names.
# Paths are relative to the directory that the server is started in.
repository = "models"
model_control_mode = "explicit"
load_model = ["*"]
"""
_AUTHORED, _CLIENT, _CONFIG, _MODELS = "model.py", "client.py", "xlaserve.toml", "models"


def init(
    directory: Annotated[Path, typer.Argument(help="The directory to create; may exist if empty.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="After --: options for `xlaserve import`."),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="FILE.py:NAME of a function or an Exportable, an ONNX or .pt2 file, a Hugging"
            " Face directory, or pkg:NAME of a model in an installed package; an example by"
            " default.",
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="The model's name; defaults to the file's name.")] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="x=FP32[-1,3]: an argument of a plain function, in order; may be repeated.",
        ),
    ] = None,
) -> None:
    """Create a repository with a model, a settings file and a client."""
    found = sources.find(source or f"{directory / _AUTHORED}:model", inputs or ())
    model = check_name("model", name or (found.name if source else _EXAMPLE))
    names = (*(() if source else (_AUTHORED,)), _CLIENT, _CONFIG, _MODELS)
    there = [each for each in names if (directory / each).exists()]
    if there:
        raise InvalidRequest(f"'{directory / there[0]}' already exists and was not changed")
    was_there = directory.is_dir()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if not source:
            (directory / _AUTHORED).write_text(_MODEL)
        with unwinding_on_signals(), reported_in_one_line(found.text, with_traceback=False):
            path = found.write(directory / _MODELS / model, options or ())
        client = sources.client_of(path, model)
    except BaseException:
        # Remove everything, so that the same command works once the error has been fixed.
        if was_there:
            shutil.rmtree(directory / _MODELS, ignore_errors=True)
            if not source:
                (directory / _AUTHORED).unlink(missing_ok=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    (directory / _CONFIG).write_text(_SETTINGS)
    (directory / _CLIENT).write_text(client)
    typer.echo(f"{path} is the model; next:")
    for line in (f"cd {directory}", "xlaserve serve --config xlaserve.toml", "python client.py"):
        typer.echo(f"  {line}")
