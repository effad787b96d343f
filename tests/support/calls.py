"""Calls that record their answers, and observers that record calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from xlaserve.serving.call import Call, Outcome
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest, InferResponse


class NotedCall(Call):
    """A call that appends its answers to `told`."""

    def __init__(self, **attributes: Any) -> None:
        self.told: list[tuple[Any, bool]] = []
        """Answers and errors, each with a flag that tells whether it is the last."""
        self.takes_more = True
        for name, value in attributes.items():
            setattr(self, name, value)

    def write(self, response: Any, *, last: bool) -> None:
        self.told.append((response, last))

    def refuse(self, error: BaseException) -> None:
        self.told.append((error, True))

    @property
    def is_writable(self) -> bool:
        return self.takes_more


@dataclass
class NotingObserver:
    """Records the start and end of each call, and how many answers the call had at that moment."""

    began_with: list[Call] = field(default_factory=list)
    ended_with: list[tuple[Sequence[Call], Outcome]] = field(default_factory=list)
    told_before: list[int] = field(default_factory=list)

    def began(self, call: Call) -> None:
        self.began_with.append(call)

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        self.ended_with.append((tuple(calls), outcome))
        self.told_before += [len(call.told) for call in calls if isinstance(call, NotedCall)]


class CountedHeaders:
    """Headers that count lookups."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.looks = 0

    def get(self, name: str, /) -> str | None:
        self.looks += 1
        return self._values.get(name)


Told: TypeAlias = Callable[[InferResponse | BaseException], object]


class ToldInfer(InferCall):
    """An inference that passes each answer or error to a callback."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def write(self, response: InferResponse, *, last: bool) -> None:
        self.told(response)

    def refuse(self, error: BaseException) -> None:
        self.told(error)


def begin(engine: Engine, request: InferRequest, told: Told) -> ToldInfer:
    """Begin a request; `told` gets its answers, possibly before this returns."""
    call = ToldInfer(told)
    engine.begin(call, request)
    return call
