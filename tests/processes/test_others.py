"""Questions of one worker to the others: what can be sent, and how failures are reported."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from structlog.testing import capture_logs

from xlaserve.concurrency.control_plane import Answer, OneProcess
from xlaserve.concurrency.others import Question
from xlaserve.errors import ShuttingDown
from xlaserve.residence.catalog import IndexEntry
from xlaserve.residence.reports.monitor import VersionReport
from xlaserve.serving.statistics import VersionStatistics
from xlaserve.workers.others import OtherWorkers


class Plane(OneProcess):
    """A control plane on which the other workers give fixed answers."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.given: dict[str, Any] = {}

    def answer(self, question: str, reply: Any) -> None:
        """Keep the reply, for the test to call."""
        self.given[question] = reply

    async def ask_all(self, question: str, content: Any = None) -> Sequence[Answer]:
        """Return the fixed answers."""
        assert (Question.INDEX, {"a": "b"}) == (question, content)
        return self._answers


OWN = [IndexEntry("m", "1", "READY", "")]
THEIRS = {"name": "m", "version": "1", "state": "LOADING", "reason": "reading"}


async def test_answers_are_read_as_what_was_asked_for() -> None:
    plane = Plane(Answer(0, [THEIRS]), Answer(2, [THEIRS]))
    asked = await OtherWorkers(plane, 1).ask(Question.INDEX, {"a": "b"}, OWN, list[IndexEntry])
    entry = IndexEntry("m", "1", "LOADING", "reading")

    assert {"1": OWN, "0": [entry], "2": [entry]} == asked.answers
    assert {} == asked.missing


async def test_workers_that_say_nothing_or_nonsense_are_named() -> None:
    """They are named in the answer and in the log, instead of being left out silently."""
    plane = Plane(Answer(0, None, "no answer within 2 s"), Answer(2, [{"name": 1}]))
    with capture_logs() as logs:
        asked = await OtherWorkers(plane, 1).ask(Question.INDEX, {"a": "b"}, OWN, list[IndexEntry])

    assert {"1": OWN} == asked.answers
    assert ["0", "2"] == list(asked.missing)
    assert "no answer within 2 s" == asked.missing["0"]
    assert asked.missing["2"].startswith("its answer cannot be read: ")
    assert [0, 2] == [record["peer"] for record in logs]


async def test_what_crosses_is_what_json_can_hold() -> None:
    """Statistics contain immutable mappings, and arrive unchanged."""
    statistics = VersionStatistics()
    statistics.failed(ShuttingDown(), 5)
    report = VersionReport("m", "1", statistics.totals(), ())
    plane = Plane()

    async def answering(about: Mapping[str, str]) -> object:
        assert isinstance(report.totals.failures, MappingProxyType)
        return [report, about["model"]]

    OtherWorkers(plane, 0).answer(Question.STATISTICS, answering)
    said = msgspec.json.decode(
        msgspec.json.encode(await plane.given[Question.STATISTICS]({"model": "m"}))
    )

    assert [report] == msgspec.convert(said[:1], list[VersionReport])
    assert "m" == said[1]
