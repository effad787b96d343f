"""Rewrites model files on disk so that future JAX versions can read them."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import jax
import jax.export
import msgspec

from xlaserve import build
from xlaserve.artifact import artifact, manifest, replaced
from xlaserve.artifact import generator_record as generator
from xlaserve.artifact.computation import (
    Computation,
    is_lasting,
    is_same,
    lasting,
    of_artifact,
    stablehlo_version,
    to_artifact,
    to_file,
)
from xlaserve.artifact.manifest import ARTIFACT, STABLEHLO, Manifest
from xlaserve.artifact.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.artifact.written_by import Writer
from xlaserve.authoring import read_back
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.temporary import TemporaryDirectory, remove_leftovers
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.exported import single_file

_SUFFIX = Path(ARTIFACT).suffix


class Result(StrEnum):
    """The result for one version, or for a single-file model."""

    CURRENT = "current"
    """The version is up to date."""
    MIGRATED = "migrated"
    DUE = "due"
    """A dry run found that a migration is needed."""
    SKIPPED = "skipped"
    """This kind of model cannot be migrated."""
    RESTORED = "restored"
    """The backup was restored."""
    FAILED = "failed"
    """The migration failed, and the version is unchanged."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for one version, a row of the report."""

    path: Path
    result: Result
    detail: str = ""
    notes: str = field(default="", compare=False)
    """The path of the backup, and the information that only the backup has."""


@dataclass(frozen=True, slots=True)
class _Done:
    """The changes made, or planned in a dry run; empty if there are none."""

    done: list[str]
    notes: list[str]


def migrate(path: Path, *, dry_run: bool = False) -> Iterator[Outcome]:
    """Migrate a repository, a model, a version or a file, and yield the outcome of each version.

    Each version is replaced atomically, so a server may load it meanwhile, and this process may be
    killed.
    """
    if not path.exists():
        yield Outcome(path, Result.FAILED, "is missing")
    elif path.is_file():
        if not dry_run:
            remove_leftovers(path.parent)
        yield _outcome(path, dry_run)
    else:
        yield from _in_directory(path, dry_run)


def undo(path: Path, *, dry_run: bool = False) -> Iterator[Outcome]:
    """Restore the backups of migrated versions that no server has loaded; yield each outcome."""
    for found in replaced.kept_below(path.absolute()):
        try:
            done = dry_run or replaced.put_back(found)
        except OSError as error:
            yield Outcome(found, Result.FAILED, str(error))
            continue
        changed = "" if done else "was rewritten since and is kept"
        if not done:
            yield Outcome(found, Result.SKIPPED, changed)
        else:
            yield Outcome(found, Result.DUE if dry_run else Result.RESTORED)


def _in_directory(directory: Path, dry_run: bool) -> Iterator[Outcome]:
    if not dry_run:
        remove_leftovers(directory)
    if _manifest_of(directory):
        yield _outcome(directory, dry_run)
        return
    if directory.name.isdecimal() and _is_code(directory):
        yield Outcome(directory, Result.SKIPPED, "is a Python model, which needs no migration")
        return
    children = sorted(child for child in directory.iterdir() if not child.name.startswith("."))
    if directory.name.isdecimal() and not any(child.suffix == _SUFFIX for child in children):
        yield Outcome(directory, Result.SKIPPED, f"{manifest.FILE_NAME} is missing")
    for child in children:
        if child.is_symlink() and (child.is_dir() or child.suffix == _SUFFIX):
            yield Outcome(child, Result.SKIPPED, f"is a link to {child.readlink()}")
        elif child.is_dir():
            yield from _in_directory(child, dry_run)
        elif child.suffix == _SUFFIX:
            yield _outcome(child, dry_run)


def _is_code(version: Path) -> bool:
    """Tell whether a version is a Python model; False if its configuration is unreadable."""
    with suppress(InvalidModel):
        return loaders.recognised(version, read_config(version.parent)) == loaders.PYTHON
    return False


def _outcome(path: Path, dry_run: bool) -> Outcome:
    try:
        done = _migrate_file(path, dry_run) if path.is_file() else _migrate_version(path, dry_run)
    except (InvalidModel, OSError) as error:
        return Outcome(path, Result.FAILED, str(error))
    if not done.done:
        return Outcome(path, Result.CURRENT)
    result = Result.DUE if dry_run else Result.MIGRATED
    return Outcome(path, result, ", ".join(done.done), "; ".join(done.notes))


def _migrate_version(directory: Path, dry_run: bool) -> _Done:
    """Migrate a version directory and replace it; return the changes made.

    The new version is written to a temporary directory and read back before it replaces the old
    one.
    """
    renew = KINDS[_manifest_of(directory)]
    renewal = renew(directory)
    if not renewal.done:
        return _NOTHING
    _check_no_checksum(directory, renewal.writes)
    if not dry_run:
        remove_leftovers(directory.parent)
        with TemporaryDirectory(directory.parent) as temporary:
            staged = temporary.path / directory.name
            replaced.copy(directory, staged)
            renewal.write(staged)
            read_back.check(staged)
            replaced.keep(directory, staged)
            temporary.replace(staged, directory)
    return _Done(renewal.done, _notes(directory, renewal.lost))


def _notes(path: Path, lost: Collection[str]) -> list[str]:
    """Return how long the migration can be undone, and what is lost afterwards."""
    place = replaced.place_of(path)
    return [
        f"{place.relative_to(place.parents[2])} keeps the old version until a server has loaded"
        " the new one; `xlaserve repo migrate --undo` restores it until then",
        *(f"a migration cannot restore {one}" for one in lost),
    ]


_NOTHING = _Done([], [])


def _manifest_of(directory: Path) -> str:
    """Return the name of a version's manifest, or an empty string if there is none."""
    return next((name for name in KINDS if (directory / name).exists()), "")


def _check_no_checksum(directory: Path, names: Collection[str]) -> None:
    """Raise InvalidModel if the configuration has a checksum of one of these files."""
    config = read_config(directory.parent)
    for checksum in config.checksums:
        place = Path(checksum.file)
        if place.parent == Path(directory.name) and place.name in names:
            raise InvalidModel(
                f"the configuration has the MD5 of {checksum.file} (model_repository_agents),"
                " which the migration changes: remove it, migrate, and add the new one"
            )


# --- version directories ---


@dataclass(frozen=True, slots=True)
class _Renewal:
    """The pending migration of one version directory."""

    done: list[str]
    """Descriptions of the changes made; empty if none was needed."""
    writes: Collection[str]
    """Names of the files to write."""
    write: Callable[[Path], None]
    """Writes the migrated files into a copy of the directory."""
    lost: Collection[str] = ()
    """Descriptions of the information that the new version lacks."""


def _exported(directory: Path) -> _Renewal:
    described = manifest.read(directory)
    found = of_artifact(artifact.read(directory, described))
    refused = _refusal(directory, described)
    done: list[str] = []
    changes: dict[str, bytes] = {}
    durable, version = described.durable, described.jax_version
    lost: list[str] = []
    if durable is None:
        computation = _made_to_last(found)
        durable = artifact.durable_of(computation)
        done.append(f"{STABLEHLO} added (StableHLO {stablehlo_version(computation.module)})")
        changes[STABLEHLO] = computation.module
    elif not is_lasting(found.module) and is_lasting((older := _made_to_last(found)).module):
        before, after = stablehlo_version(found.module), stablehlo_version(older.module)
        durable = artifact.durable_of(older)
        done.append(f"StableHLO {before} is now {after}")
        changes[STABLEHLO] = older.module
        refused = refused or "was newer"
    if refused:
        done.append(f"{ARTIFACT} {refused}, written by jax {jax.__version__}")
        changes[ARTIFACT] = _as_file(found)
        if ARTIFACT in described.files:
            lost.append(_bytes_of(ARTIFACT, version))
        version = jax.__version__

    def write(target: Path) -> None:
        written = {n: files.write_atomically(target / n, [data]) for n, data in changes.items()}
        known = {**described.files, **written}
        manifest.write(
            target,
            dataclasses.replace(
                described,
                files=known,
                durable=durable,
                jax_version=version,
                written_by=build.version(),
            ),
        )

    return _Renewal(done, changes, write, lost)


def _bytes_of(name: str, version: str) -> str:
    return f"{name} as jax {version} wrote it"


def _generator(directory: Path) -> _Renewal:
    described = generator.read(directory)
    done: list[str] = []
    lost: list[str] = []
    changes: dict[str, bytes] = {}
    for name in (generator.DECODE, generator.CHUNK):
        limit, expected = LIMIT_ARTIFACT_BYTES, described.files[name].record
        data = files.read_checked(directory, name, limit_bytes=limit, record=expected)
        if renewed := _renewed(data, name):
            done.append(f"{name} {renewed.text}")
            changes[name] = renewed.data
            lost.append(_bytes_of(name, Writer.of(described.jax_version).jax))

    def write(target: Path) -> None:
        written = dict(described.files)
        for name, data in changes.items():
            file = files.write_atomically(target / name, [data])
            written[name] = generator.File(file.size_bytes, file.sha256)
        version = Writer(jax.__version__, build.version()).text
        record = msgspec.structs.replace(described, files=written, jax_version=version)
        generator.write(target, record)

    return _Renewal(done, changes, write, lost)


KINDS: Mapping[str, Callable[[Path], _Renewal]] = MappingProxyType(
    {manifest.FILE_NAME: _exported, generator.FILE_NAME: _generator}
)
"""Migrations of version directories, by the name of their manifest."""


# --- rewriting computations ---


def _made_to_last(found: Computation) -> Computation:
    computation = lasting(to_artifact(found))
    if not is_same(found.module, computation.module):
        raise InvalidModel("its computation would change when rewritten; nothing was written")
    return computation


def _refusal(directory: Path, described: Manifest) -> str:
    """Return why a `jax.export` file must be rewritten, or an empty string if it need not be."""
    if ARTIFACT not in described.files:
        return "was missing"
    data = files.read_checked(directory, ARTIFACT, limit_bytes=LIMIT_ARTIFACT_BYTES)
    if artifact.is_read_by_jax(data):
        return ""
    return f"of jax {described.jax_version} is rejected by the installed jax"


@dataclass(frozen=True, slots=True)
class _Renewed:
    text: str
    data: bytes


def _renewed(data: bytearray, name: str) -> _Renewed | None:
    """Return a `jax.export` file rewritten for future JAX versions, or None if it is current."""
    found = of_artifact(artifact.deserialize(data, name=name))
    computation = _made_to_last(found)
    before, after = stablehlo_version(found.module), stablehlo_version(computation.module)
    if artifact.is_read_by_jax(data) and before == after:
        return None
    text = f"written by jax {jax.__version__}, StableHLO {before} is now {after}"
    return _Renewed(text, _as_file(found))


def _migrate_file(path: Path, dry_run: bool) -> _Done:
    data = files.read_checked(path.parent, path.name, limit_bytes=LIMIT_ARTIFACT_BYTES)
    renewed = _renewed(data, path.name)
    if renewed is None:
        return _NOTHING
    if path.parent.name.isdecimal():
        _check_no_checksum(path.parent, (path.name,))
    if not dry_run:
        with TemporaryDirectory(path.parent) as temporary:
            staged = temporary.path / path.name
            files.write_atomically(staged, [renewed.data])
            single_file.read_file(staged)
            replaced.keep(path, staged)
            temporary.replace(staged, path)
    return _Done([renewed.text], _notes(path, [f"{path.name} as the jax that made it wrote it"]))


def _as_file(found: Computation) -> bytes:
    computation = _made_to_last(found)
    return to_file(to_artifact(computation), computation)
