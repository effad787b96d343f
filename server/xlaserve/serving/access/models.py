"""Sets of models that callers may use, as exact names and patterns."""

import re
from collections.abc import Iterable
from fnmatch import translate

from xlaserve.errors.access import NotPermitted
from xlaserve.serving.call import Operation
from xlaserve.serving.standing import Standing

OF_MODELS = frozenset(
    {
        Operation.INFER,
        Operation.METADATA,
        Operation.MANAGE,
        Operation.READINESS,
        Operation.HEALTH,
        Operation.PAGE,
    }
)
"""Operations that rules may limit to some models."""
MOST_CHARACTERS = 1024
"""Longer names match no pattern, because matching them takes too long."""
_PATTERN = re.compile(r"[*?\[]")


class ModelNames:
    """Model names and shell patterns (`*`, `?`, `[abc]`)."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        patterns = sorted(text for text in self._texts if _PATTERN.search(text))
        self._pattern = re.compile("|".join(map(translate, patterns))) if patterns else None

    def __contains__(self, name: str) -> bool:
        if name in self._texts:
            return True
        pattern = self._pattern
        return pattern is not None and len(name) <= MOST_CHARACTERS and bool(pattern.match(name))


class CallerSight:
    """The model visibility of a caller for one operation."""

    def __init__(
        self,
        principal: str,
        operation: Operation,
        permitted: ModelNames,
        known: ModelNames,
        standing: Standing,
    ) -> None:
        """`permitted` has the models of this operation, `known` those of any operation.

        `standing` decides the error for hidden models.
        """
        self._standing = standing
        self._principal = principal
        self._operation = operation
        self._permitted = permitted
        self._known = known

    def permits(self, model: str) -> bool:
        """Tell whether the caller may perform the operation on a model.

        Raises NotPermitted if the caller may only perform other operations on it.
        """
        if model in self._permitted:
            return True
        if model in self._known:
            raise NotPermitted(self._principal, f"{self._operation.value} model '{model}'")
        return False

    def shows(self, model: str) -> bool:
        """Tell whether the operation is permitted on a model."""
        return model in self._permitted

    def absent(self, model: str, version: str, *, detail: str) -> Exception:
        """Return the error for a hidden model."""
        return self._standing.absent(model, version, detail=detail)

    def refuse_server(self) -> None:
        """Raise NotPermitted: the caller's permissions are limited to some models."""
        raise NotPermitted(self._principal, f"{self._operation.value} the whole server")
