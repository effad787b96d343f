"""Opens the repositories in the settings: directories and object stores."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json, read_config
from xlaserve.residence.repository.parts import Part
from xlaserve.residence.repository.remote.part import LocalReading, RemotePart
from xlaserve.residence.repository.remote.remotes import Remotes
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import ModelSource
from xlaserve.settings import Settings
from xlaserve.storage.urls import url_of


def open_repositories(settings: Settings) -> Repository:
    """Open the repositories in the settings as one. Links may lead from one into another.

    Raises InvalidSettings if the cache of fetched models cannot be used.
    """
    given = (settings.repository, *settings.model_repository, *settings.model_root)
    local = [root for root in given if not url_of(root)]
    remotes = Remotes.of_settings(settings, _reading(settings))

    def one(
        root: Path, remote: RemotePart | None = None, others: Sequence[Part] = ()
    ) -> Repository:
        return Repository(
            root,
            extra_roots=local,
            max_models=settings.max_models,
            max_config_bytes=settings.max_config_bytes,
            bare_name="" if remote else settings.bare_model,
            remote=remote,
            others=others,
            remotes=remotes,
        )

    others = [remotes.at(root) or one(root) for root in settings.model_repository]
    return one(settings.repository, remotes.at(settings.repository), others)


def _reading(settings: Settings) -> LocalReading:
    limit = settings.max_config_bytes

    def config(directory: Path, text: str | None) -> ModelConfig:
        if text is not None:
            return parse_json(text, limit_bytes=limit)
        return read_config(directory, limit_bytes=limit, roots=Roots.of((directory,)))

    return LocalReading(config, partial(_find, settings))


def _find(settings: Settings, models: Path, name: str, text: str | None) -> ModelSource:
    inner = Repository(
        models, max_models=settings.max_models, max_config_bytes=settings.max_config_bytes
    )
    return inner.find_own(name, text)
