"""Overrides: configuration and files that a client sends with a load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from xlaserve.errors import FileNameTooLong, InvalidParameter, TooLarge
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.residence.repository.exhaustion import write_failure
from xlaserve.residence.repository.names import MAX_NAME_BYTES, check_name, check_version

LoadParameter: TypeAlias = bool | int | str | bytes
"""Value of a load or unload parameter."""

CONFIG = "config"
FILE_PREFIX = "file:"
UNLOAD_DEPENDENTS = "unload_dependents"


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """The validated parameters of a load (model repository extension, Load)."""

    config: str | None = None
    files: Mapping[tuple[int, str], bytes] = field(default_factory=dict)
    """(version, file name) -> contents."""

    @classmethod
    def read(
        cls,
        model: str,
        parameters: Mapping[str, LoadParameter],
        *,
        max_files: int,
        max_bytes: int,
    ) -> Self:
        """Validate names, types and limits.

        Raises InvalidParameter, InvalidName, FileNameTooLong or TooLarge.
        """
        config: str | None = None
        files: dict[tuple[int, str], bytes] = {}
        for name, value in parameters.items():
            if name == CONFIG:
                if not isinstance(value, str):
                    raise InvalidParameter(name, "a string", _kind(value))
                config = value
            elif name.startswith(FILE_PREFIX):
                if not isinstance(value, bytes):
                    raise InvalidParameter(name[:80], "bytes", _kind(value))
                files[_file_name(model, name)] = value
            else:
                raise InvalidParameter(
                    name[:80], "'config' or 'file:<version>/<name>'", "unrecognized load parameter"
                )
        if files and config is None:
            raise InvalidParameter(CONFIG, "a configuration with the files", "none")
        if len(files) > max_files:
            raise InvalidParameter("file:", f"at most {max_files} files", str(len(files)))
        if sum(map(len, files.values())) > max_bytes:
            raise TooLarge("the total size of a load's files", max_bytes, "max_override_bytes")
        return cls(config, files)


def read_unload_parameters(parameters: Mapping[str, LoadParameter]) -> bool:
    """Return the value of `unload_dependents` (model repository extension, Unload)."""
    dependents = False
    for name, value in parameters.items():
        if name != UNLOAD_DEPENDENTS:
            raise InvalidParameter(
                name[:80], f"'{UNLOAD_DEPENDENTS}'", "unrecognized unload parameter"
            )
        if not isinstance(value, bool):
            raise InvalidParameter(name, "a boolean", _kind(value))
        dependents = value
    return dependents


def _kind(value: LoadParameter) -> str:
    names = {bool: "a boolean", int: "an integer", str: "a string", bytes: "bytes"}
    return names[type(value)]


def _file_name(model: str, parameter: str) -> tuple[int, str]:
    # Like Triton, accept `file:/1/model.py` as relative to the model's directory.
    path = parameter.removeprefix(FILE_PREFIX).removeprefix("/")
    for part in path.split("/"):
        if len(part.encode(errors="replace")) > MAX_NAME_BYTES:
            raise FileNameTooLong(model, part, MAX_NAME_BYTES)
    version, separator, name = path.partition("/")
    if not separator:
        raise InvalidParameter(parameter[:80], "'file:<version>/<name>'", "no '/'")
    return check_version(version), check_name("file name", name)


@dataclass(frozen=True, slots=True)
class Override:
    """A temporary directory used instead of a model's own directory until the model is unloaded."""

    temporary: TemporaryDirectory
    names: tuple[str, ...] = ()
    """The files, relative to the directory."""

    @property
    def directory(self) -> Path:
        """Return the directory, which is laid out like a model directory."""
        return self.temporary.path

    @classmethod
    def write(cls, model: str, files: Mapping[tuple[int, str], bytes], scratch: Path) -> Self:
        """Write the files to a new directory below `scratch`. Blocks on disk I/O.

        Raises OutOfSpace if they do not fit, or LoadFailed if they cannot be written; removes the
        directory in both cases.
        """
        try:
            temporary = TemporaryDirectory(scratch)
            try:
                _write_below(temporary.path, files)
            except BaseException:
                temporary.remove()
                raise
        except OSError as error:
            raise write_failure(model, error) from error
        return cls(temporary, tuple(sorted(f"{version}/{name}" for version, name in files)))

    def files(self) -> dict[str, bytes]:
        """Read the files, keyed by the load parameters that sent them. Blocks on disk I/O.

        Raises OSError if one is missing, such as after a cleanup of temporary files.
        """
        root = self.directory
        return {f"{FILE_PREFIX}{name}": (root / name).read_bytes() for name in self.names}

    def remove(self) -> None:
        """Remove the directory and everything below it."""
        self.temporary.remove()


def _write_below(directory: Path, files: Mapping[tuple[int, str], bytes]) -> None:
    for (version, name), content in files.items():
        path = directory / str(version) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
