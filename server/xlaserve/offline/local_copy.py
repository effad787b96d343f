"""Local copies of repositories in stores, for commands that read models without serving."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from xlaserve.errors import InvalidSettings, LoadFailed, XlaserveError
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.residence.repository.exhaustion import load_failure
from xlaserve.residence.repository.remote.part import RemotePart
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.residence.repository.wrong_root import check_roots
from xlaserve.settings import Settings
from xlaserve.storage.objects import StoreProblem
from xlaserve.storage.urls import url_of


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """The settings of a command, with local directories in place of URLs."""

    settings: Settings
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why models in a store could not be fetched, by name."""


EVERY_VERSION = '{"version_policy": {"all": {}}}'
"""Configuration that makes a fetch include all versions of a model."""


def with_schemes(settings: Settings) -> Settings:
    """Return settings that allow the URL schemes of their own roots.

    The user of a command chooses its URLs; `remote_schemes` restricts only servers. Raises
    InvalidSettings for an invalid root.
    """
    roots = (settings.repository, *settings.model_repository)
    named = {url.partition(":")[0] for root in roots if (url := url_of(root))}
    allowed = replace(settings, remote_schemes=tuple(named))
    check_roots(allowed)
    return allowed


@contextmanager
def local_copy(
    settings: Settings, *, only: str = "", config_text: str | None = None
) -> Iterator[LocalCopy]:
    """Fetch the models in stores, and yield settings that name local directories; blocks.

    With `only`, other models in stores are skipped. `config_text` replaces the configuration that
    decides which versions are fetched. The directories are removed after the block; the downloads
    stay in the cache. Raises InvalidSettings for a root that is invalid or cannot be listed.
    """
    roots = (settings.repository, *settings.model_repository)
    allowed = with_schemes(settings)
    if not allowed.remote_schemes:
        yield LocalCopy(settings)
        return
    remotes = open_repositories(allowed).remotes
    with ExitStack() as stack:
        stack.callback(remotes.close)
        folder = TemporaryDirectory(remotes.directory)
        stack.callback(folder.remove)
        failures: dict[str, str] = {}

        def fetched(number: int, root: Path) -> Path:
            part, place = remotes.at(root), folder.path / str(number)
            if part is None:
                return root
            place.mkdir(mode=0o700)
            failures.update(_fetch_all(part, place, stack, only, config_text))
            return place

        first, *others = [fetched(number, root) for number, root in enumerate(roots)]
        yield LocalCopy(
            replace(settings, repository=first, model_repository=tuple(others)), failures
        )


def _fetch_all(
    part: RemotePart, place: Path, stack: ExitStack, only: str, config_text: str | None
) -> Iterator[tuple[str, str]]:
    """Fetch every model of a store; yield the name and the reason of each failed fetch."""
    part.refresh()
    try:
        names = part.listing().models
    except StoreProblem as problem:
        expected = f"a URL that can be listed ({problem})"
        raise InvalidSettings("repository", expected, part.url) from problem
    for name in names:
        if only not in ("", name):
            continue
        try:
            for path in _fetched(part, name, stack, config_text):
                shutil.copytree(path, place / name, copy_function=_link, dirs_exist_ok=True)
        except XlaserveError as error:
            yield name, str(error)
        except OSError as error:
            yield name, str(load_failure(name, f"its files cannot be kept: {error}", error))


def _fetched(
    part: RemotePart, name: str, stack: ExitStack, config_text: str | None
) -> Sequence[Path]:
    """Fetch a model's versions, and return their directories, which exist until `stack` closes."""
    part.prepare(name, config_text)
    paths = []
    for version in part.find_own(name, config_text).versions:
        assert version.remote is not None
        try:
            lease = version.remote.take(version.remote.control())
        except StoreProblem as problem:
            url = version.remote.url
            raise LoadFailed(name, f"{url} cannot be fetched: {problem}") from problem
        stack.callback(lease.close)
        paths.append(lease.path)
    return paths


def _link(source: str, target: str) -> None:
    """Hard-link a file into a version directory, unless it exists there.

    Files next to the versions are linked once for each version.
    """
    with suppress(FileExistsError):
        try:
            os.link(source, target)
        except PermissionError:  # the file system has no hard links
            shutil.copyfile(source, target)
