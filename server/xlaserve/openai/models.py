"""The models of OpenAI's endpoints: loaded text models that the caller may see."""

from typing import Literal

import msgspec

from xlaserve.errors import ModelNotFound, ModelNotReady
from xlaserve.residence.registry import Registry
from xlaserve.residence.server import NAME
from xlaserve.serving.access.sight import require_seen_now, seen_now


class OpenAiModel(msgspec.Struct, kw_only=True):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Time of the export, in seconds since the epoch."""
    owned_by: str = NAME
    max_model_len: int
    """The most tokens of a request, prompt and answer together; of one input for embeddings."""


class OpenAiModelList(msgspec.Struct):
    """The models, by name."""

    data: list[OpenAiModel]
    object: Literal["list"] = "list"


class OpenAiModels:
    """Finds generators, and models of embeddings, by name."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def list(self) -> OpenAiModelList:
        """Return the ready models visible to the current caller."""
        self._registry.standing.require_listed("of this server")
        sees = seen_now()
        names = [model.name for model in self._registry.models() if sees(model.name)]
        found = [self._found(name) for name in names]
        return OpenAiModelList([model for model in found if model is not None])

    def get(self, name: str) -> OpenAiModel:
        """Return one; raises ModelNotFound, or StillStarting."""
        require_seen_now(name)
        found = self._found(name)
        if found is None:
            # Of one that is not a model of text, too, nothing is told.
            raise self._registry.standing.absent(name)
        return found

    def _found(self, name: str) -> OpenAiModel | None:
        try:
            _, instance = self._registry.resolve(name)
        except (ModelNotFound, ModelNotReady):
            return None
        info = instance.info
        if info.generation is not None:
            return _model(name, info.generation.written_at, info.generation.max_length)
        if info.embedding is not None:
            return _model(name, info.embedding.written_at, info.embedding.max_tokens)
        return None


def _model(name: str, created: int, most: int) -> OpenAiModel:
    return OpenAiModel(id=name, created=created, max_model_len=most)
