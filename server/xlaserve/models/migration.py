"""Models on disk that are made to last: whatever this JAX can read, in what later ones will."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import jax
import jax.export

from xlaserve.errors import InvalidModel
from xlaserve.models import artifact, files, manifest
from xlaserve.models.computation import (
    Computation,
    is_same,
    lasting,
    of_artifact,
    stablehlo_version,
    to_artifact,
    to_file,
)
from xlaserve.models.manifest import ARTIFACT, STABLEHLO, Manifest
from xlaserve.models.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.temporary import remove_leftovers

_SUFFIX = Path(ARTIFACT).suffix


class Result(StrEnum):
    """The result for one version, or for a model that is one file."""

    CURRENT = "current"
    """Nothing was to be done."""
    MIGRATED = "migrated"
    DUE = "due"
    """Something is to be done, and was not because it was only asked."""
    SKIPPED = "skipped"
    """It is nothing that can be migrated."""
    FAILED = "failed"
    """It is as it was."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the report."""

    path: Path
    result: Result
    detail: str = ""


def migrate(path: Path, *, dry_run: bool = False) -> Iterator[Outcome]:
    """Migrate a repository, a model, a version or a file, and yield what became of each version.

    At every moment each version is whole: a server may load it meanwhile, and this may be killed.
    """
    if not path.exists():
        yield Outcome(path, Result.FAILED, "is missing")
    elif path.is_file():
        if not dry_run:
            remove_leftovers(path.parent)
        yield _outcome(path, dry_run)
    else:
        yield from _in_directory(path, dry_run)


def _in_directory(directory: Path, dry_run: bool) -> Iterator[Outcome]:
    if not dry_run:
        remove_leftovers(directory)
    if (directory / manifest.FILE_NAME).exists():
        yield _outcome(directory, dry_run)
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


def _outcome(path: Path, dry_run: bool) -> Outcome:
    try:
        done = _migrate_file(path, dry_run) if path.is_file() else _migrate_version(path, dry_run)
    except (InvalidModel, OSError) as error:
        return Outcome(path, Result.FAILED, str(error))
    if not done:
        return Outcome(path, Result.CURRENT)
    return Outcome(path, Result.DUE if dry_run else Result.MIGRATED, ", ".join(done))


def _migrate_version(directory: Path, dry_run: bool) -> list[str]:
    described = manifest.read(directory)
    found = of_artifact(artifact.read(directory, described))
    refused = _refusal(directory, described)
    done: list[str] = []
    if described.durable is None:
        computation = _made_to_last(found)
        done.append(f"{STABLEHLO} added (StableHLO {stablehlo_version(computation.module)})")
        if not dry_run:
            described = _add_stablehlo(directory, described, computation, keep=not refused)
    if refused:
        done.append(f"{ARTIFACT} {refused}, written by jax {jax.__version__}")
        if not dry_run:
            _write_artifact(directory, described, found)
    return done


def _made_to_last(found: Computation) -> Computation:
    computation = lasting(to_artifact(found))
    if not is_same(found.module, computation.module):
        raise InvalidModel("its computation changes when it is written again, nothing was written")
    return computation


def _refusal(directory: Path, described: Manifest) -> str:
    """Say why the file of `jax.export` has to be written again; empty where it has not."""
    if ARTIFACT not in described.files:
        return "was missing"
    data = files.read_checked(directory, ARTIFACT, limit_bytes=LIMIT_ARTIFACT_BYTES)
    if artifact.is_read_by_jax(data):
        return ""
    return f"of jax {described.jax_version} is refused by this one"


def _add_stablehlo(
    directory: Path, described: Manifest, computation: Computation, *, keep: bool
) -> Manifest:
    record = files.write_atomically(directory / STABLEHLO, [computation.module])
    kept = {name: r for name, r in described.files.items() if keep or name != ARTIFACT}
    changed = dataclasses.replace(
        described,
        files={**kept, STABLEHLO: record},
        durable=artifact.durable_of(computation),
    )
    manifest.write(directory, changed)
    return changed


def _write_artifact(directory: Path, described: Manifest, computation: Computation) -> None:
    rest = {name: record for name, record in described.files.items() if name != ARTIFACT}
    if ARTIFACT in described.files:
        # The manifest first drops the file that is about to change: nothing is loaded from it.
        manifest.write(directory, dataclasses.replace(described, files=rest))
    record = files.write_atomically(directory / ARTIFACT, [_as_file(computation)])
    manifest.write(
        directory,
        dataclasses.replace(
            described, files={**rest, ARTIFACT: record}, jax_version=jax.__version__
        ),
    )


def _migrate_file(path: Path, dry_run: bool) -> list[str]:
    data = files.read_checked(path.parent, path.name, limit_bytes=LIMIT_ARTIFACT_BYTES)
    found = of_artifact(artifact.deserialize(data, name=path.name))
    computation = _made_to_last(found)
    before, after = stablehlo_version(found.module), stablehlo_version(computation.module)
    if artifact.is_read_by_jax(data) and before == after:
        return []
    if not dry_run:
        files.write_atomically(path, [_as_file(computation)])
    return [f"written by jax {jax.__version__}, StableHLO {before} is now {after}"]


def _as_file(found: Computation) -> bytes:
    computation = _made_to_last(found)
    return to_file(to_artifact(computation), computation)
