"""A permission gate and an observer that record every call to a server."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from xlaserve.app import server as app
from xlaserve.errors import CrossSiteRequest
from xlaserve.serving.call import Call, Outcome
from xlaserve.serving.gates import Gates

RULE = "x-rule"
"""Header that makes the gate reject a request if its value is `refuse`."""


class NotPermitted(CrossSiteRequest):
    """Raised by the permission gate of these tests."""


@dataclass
class Watch:
    """Records calls at the gate, and when observers see them begin and end."""

    gate: list[Call] = field(default_factory=list)
    begun: list[Call] = field(default_factory=list)
    ended_calls: list[Call] = field(default_factory=list)

    def permit(self, call: Call) -> None:
        self.gate.append(call)
        if call.headers.get(RULE) == "refuse":
            raise NotPermitted

    def began(self, call: Call) -> None:
        self.begun.append(call)

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        self.ended_calls += calls

    def clear(self) -> None:
        self.gate.clear()
        self.begun.clear()
        self.ended_calls.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all servers created in a block."""

        def gates(observers: Sequence[object] = (), **_: object) -> Gates:
            return Gates(permission=self.permit, observers=[*observers, self])  # type: ignore[list-item]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "Gates", gates)
            yield
