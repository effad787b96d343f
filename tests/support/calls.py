"""Calls that write to a list, and observers that note what they see."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from xlaserve.serving.call import Call, Outcome
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest, InferResponse


class NotedCall(Call):
    """A call whose client reads what `told` holds."""

    def __init__(self, **attributes: Any) -> None:
        self.told: list[tuple[Any, bool]] = []
        """Answers, and whether each is the last; errors are."""
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
    """Notes calls as they begin and end, and how many answers each had been told by then."""

    began_with: list[Call] = field(default_factory=list)
    ended_with: list[tuple[Sequence[Call], Outcome]] = field(default_factory=list)
    told_before: list[int] = field(default_factory=list)

    def began(self, call: Call) -> None:
        self.began_with.append(call)

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        self.ended_with.append((tuple(calls), outcome))
        self.told_before += [len(call.told) for call in calls if isinstance(call, NotedCall)]


class CountedHeaders:
    """Headers that count how often they are looked at."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.looks = 0

    def get(self, name: str, /) -> str | None:
        self.looks += 1
        return self._values.get(name)


Told: TypeAlias = Callable[[InferResponse | BaseException], object]


class ToldInfer(InferCall):
    """An inference that tells a function what it is answered, or why it is not."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def write(self, response: InferResponse, *, last: bool) -> None:
        self.told(response)

    def refuse(self, error: BaseException) -> None:
        self.told(error)


def begin(engine: Engine, request: InferRequest, told: Told) -> ToldInfer:
    """Have a request answered, and `told` called with the answer, perhaps before this returns."""
    call = ToldInfer(told)
    engine.begin(call, request)
    return call
