"""Sets of permitted models: exact names and patterns."""

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
"""Operations that rules may allow for some models; health names none."""
MOST_CHARACTERS = 1024
"""Longer names are of no model. Patterns are not compared with them: that takes time."""
_PATTERN = re.compile(r"[*?\[]")


class ModelNames:
    """Names of models, exact ones and patterns as of a shell (`*`, `?`, `[abc]`)."""

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
    """The sight of a caller for one operation."""

    def __init__(
        self,
        principal: str,
        operation: Operation,
        permitted: ModelNames,
        known: ModelNames,
        standing: Standing,
    ) -> None:
        """`permitted` are models of the operation, `known` are those of any operation.

        `standing` says how a model is answered that is nowhere.
        """
        self._standing = standing
        self._principal = principal
        self._operation = operation
        self._permitted = permitted
        self._known = known

    def permits(self, model: str) -> bool:
        """Tell whether the caller may do this with a model.

        Raises NotPermitted for one that it knows, as it may do something else with it.
        """
        if model in self._permitted:
            return True
        if model in self._known:
            raise NotPermitted(self._principal, f"{self._operation.value} model '{model}'")
        return False

    def shows(self, model: str) -> bool:
        """Tell whether a model is among those of this operation."""
        return model in self._permitted

    def absent(self, model: str, version: str, *, detail: str) -> Exception:
        """Return the error for a hidden model."""
        return self._standing.absent(model, version, detail=detail)

    def refuse_server(self) -> None:
        """Raise NotPermitted: its permissions are for some models alone."""
        raise NotPermitted(self._principal, f"{self._operation.value} the whole server")
