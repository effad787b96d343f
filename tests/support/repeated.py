"""Records which answers come from the cache of repeated requests."""

from typing import Any

import pytest

from xlaserve.serving.repeats import Repeats


def noted_repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each lookup, whether the answer was cached."""
    known, answer = [], Repeats.answer

    def noting(self: Repeats, *asked: Any) -> bytes | None:
        found = answer(self, *asked)
        known.append(found is not None)
        return found

    monkeypatch.setattr(Repeats, "answer", noting)
    return known
