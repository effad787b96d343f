"""Repositories in stores as directories, for commands that read models and serve none."""

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
    """The settings of a command, with directories in place of URLs."""

    settings: Settings
    failures: Mapping[str, str] = field(default_factory=dict)
    """Models that are in a store and could not be fetched, and why."""


EVERY_VERSION = '{"version_policy": {"all": {}}}'
"""Replaces the configuration of a model to fetch all of its versions."""


def with_schemes(settings: Settings) -> Settings:
    """Return settings that allow the schemes of their own roots.

    Who names a URL to a command allows its scheme; `remote_schemes` is for servers. Raises
    InvalidSettings for a root that is none.
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
    """Fetch what is in stores, and yield settings that name directories; blocks.

    With `only`, other models of stores are left out; a text replaces configurations where it is
    decided which versions are fetched. The directories are gone behind the block, what was fetched
    stays in the cache. Raises InvalidSettings for a root that is none, or cannot be listed.
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
    """Fetch every model of a store; yield those that cannot be, and why."""
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
    """Download a model's versions to directories, which exist until the stack is closed."""
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
    """Link a file into a version directory; files beside the versions go to each."""
    with suppress(FileExistsError):
        try:
            os.link(source, target)
        except PermissionError:  # a file system without hard links
            shutil.copyfile(source, target)
