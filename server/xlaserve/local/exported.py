"""Exports a function to a repository with one model, whose parameters can be replaced."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlaserve.errors import InvalidModel

if TYPE_CHECKING:
    from xlaserve.authoring.declared import Inputs
    from xlaserve.authoring.export import Exportable


class ExportedFunction:
    """A temporary repository with versions of one function, until `remove`."""

    def __init__(self, model: "Exportable", name: str) -> None:
        """Write the first version; raises InvalidModel."""
        self.name = name
        self._model = model
        self._version = 0
        self._directory = tempfile.TemporaryDirectory(prefix="xlaserve-")
        try:
            self.write(model.params)
        except BaseException:
            self.remove()
            raise

    @property
    def repository(self) -> Path:
        """Return the directory to serve."""
        return Path(self._directory.name)

    def write(self, params: object) -> Path:
        """Write a new version with other parameters, and return its directory.

        Raises InvalidModel.
        """
        from xlaserve.authoring.declared import check_params

        check_params(self._model.params, params)
        number = self._version + 1
        version = replace(self._model, params=params).write(
            self.repository / self.name / str(number)
        )
        self._version = number
        return version

    def keep(self, version: Path) -> None:
        """Remove all other versions."""
        for other in (self.repository / self.name).iterdir():
            if other.name.isdecimal() and other != version:
                shutil.rmtree(other)

    def drop(self, version: Path) -> None:
        """Remove a version that failed to load."""
        shutil.rmtree(version, ignore_errors=True)

    def remove(self) -> None:
        """Remove the repository."""
        self._directory.cleanup()


def exportable(
    source: "Callable[..., object] | Exportable",
    params: object,
    inputs: "Inputs | None",
    outputs: Sequence[str] | None,
    max_batch_size: int | None,
) -> "Exportable":
    """Return the function to export; raises InvalidModel without inputs."""
    from xlaserve.authoring.export import Exportable

    if isinstance(source, Exportable):
        given: dict[str, Any] = {
            "params": params,
            "inputs": inputs,
            "outputs": outputs,
            "max_batch_size": max_batch_size,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(source, **changes)
    if inputs is None:
        raise InvalidModel(
            "serve: a function needs inputs, as inputs={'x': ('FP32', [-1, 3])} where -1 is the"
            " batch, and params=... for its first argument"
        )
    return Exportable(source, params, inputs, outputs=outputs, max_batch_size=max_batch_size)


def name_of(source: object) -> str:
    """Return a model name for a function: the function's name, if it has one."""
    name = getattr(getattr(source, "fn", source), "__name__", "")
    return name if name.isidentifier() else "model"
