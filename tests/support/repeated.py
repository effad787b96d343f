"""Which answers come from bytes that were known."""

from typing import Any

import pytest

from xlaserve.serving.repeats import Repeats


def noted_repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that has, of each request that is looked up, whether its answer was known."""
    known, answer = [], Repeats.answer

    def noting(self: Repeats, *asked: Any) -> bytes | None:
        found = answer(self, *asked)
        known.append(found is not None)
        return found

    monkeypatch.setattr(Repeats, "answer", noting)
    return known
