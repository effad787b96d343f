"""Statistics of an open-loop measurement, including unanswered requests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xlaserve.bench.generation.open_loop import Observed, Trace
from xlaserve.bench.load import OK
from xlaserve.bench.results import percentile

PERCENTILES = (50.0, 90.0, 99.0)
_MILLISECONDS = 1000
_MOST_ERRORS = 16
"""Maximum number of distinct errors reported; some servers add a unique number to each message."""
_OTHER_ERRORS = "other errors"
_SHOWN_CHARACTERS = 200

Percentiles = Mapping[str, float]
"""p50, p90, p99 and max in milliseconds; empty if nothing was measured."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one measurement, without the requests of the warm-up."""

    requests: int
    answered: int
    """Number of requests with a complete answer, of any length."""
    late: int
    """Number of requests still unfinished at the end of the measurement."""
    short: int
    """Number of answers with fewer tokens than requested."""
    errors: Mapping[str, int]
    """Error message -> number of failed requests."""
    seconds: float
    """Seconds between the first request's due time and the last token."""
    prompt_tokens: int
    """Total number of prompt tokens sent."""
    tokens: int
    """Total number of tokens received."""
    first_token_ms: Percentiles
    """Time to first token, measured from the due time. A request without a token counts until the
    end of the measurement.
    """
    between_tokens_ms: Percentiles
    """Time between tokens. For an unfinished answer, the time since its last token counts too."""
    answer_ms: Percentiles
    """Time from the due time to the end of the answer, or to the end of the measurement."""
    client_lag_ms: float
    """Maximum delay with which the client sent a request after its due time."""
    client_cpu: float

    @property
    def tokens_per_second(self) -> float:
        """Return the number of tokens received per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def failed(self) -> int:
        """Return the number of failed requests."""
        return sum(self.errors.values())

    def as_json(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        return {
            "requests": self.requests,
            "answered": self.answered,
            "late": self.late,
            "short": self.short,
            "errors": dict(self.errors),
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "first_token_ms": dict(self.first_token_ms),
            "between_tokens_ms": dict(self.between_tokens_ms),
            "answer_ms": dict(self.answer_ms),
            "client_lag_ms": self.client_lag_ms,
            "client_cpu": self.client_cpu,
        }


def figures(observed: Observed) -> Figures:
    """Compute the statistics of the observed requests.

    An unanswered request counts as if its answer had arrived at the end of the measurement;
    otherwise a server that answers only some requests would look fast. Failed requests have no
    answer time, but the tokens before the error count.
    """
    traces = [trace for trace in observed.traces if trace.arrival.counted]
    cutoff = observed.cutoff
    answered = [trace for trace in traces if trace.status == OK]
    late = [trace for trace in traces if not trace.status]
    failures = Counter(
        trace.status[:_SHOWN_CHARACTERS] for trace in traces if trace.status not in ("", OK)
    )
    begin = min((trace.due for trace in traces), default=0.0)
    last = max((trace.tokens[-1] for trace in traces if trace.tokens), default=begin)
    return Figures(
        requests=len(traces),
        answered=len(answered),
        late=len(late),
        short=sum(len(trace.tokens) < trace.arrival.lengths.answer for trace in answered),
        errors=_fewer(failures),
        seconds=last - begin,
        prompt_tokens=sum(trace.arrival.lengths.prompt for trace in traces),
        tokens=sum(len(trace.tokens) for trace in traces),
        first_token_ms=_percentiles(
            [
                (trace.tokens[0] if trace.tokens else cutoff) - trace.due
                for trace in traces
                if trace.tokens or not trace.status
            ]
        ),
        between_tokens_ms=_percentiles([gap for trace in traces for gap in _gaps(trace, cutoff)]),
        answer_ms=_percentiles(
            [trace.ended - trace.due for trace in answered] + [cutoff - t.due for t in late]
        ),
        client_lag_ms=max((t.sent - t.due for t in traces), default=0.0) * _MILLISECONDS,
        client_cpu=observed.client_cpu,
    )


def _gaps(trace: Trace, cutoff: float) -> list[float]:
    times = trace.tokens.tolist()
    if times and not trace.status:
        times.append(cutoff)
    return [after - before for before, after in pairwise(times)]


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    if not seconds:
        return {}
    ascending = sorted(seconds)
    found = {f"p{q:g}": percentile(ascending, q) for q in PERCENTILES} | {"max": ascending[-1]}
    return {name: value * _MILLISECONDS for name, value in found.items()}


def _fewer(errors: "Counter[str]") -> Mapping[str, int]:
    frequent = dict(errors.most_common(_MOST_ERRORS))
    others = sum(errors.values()) - sum(frequent.values())
    return frequent | ({_OTHER_ERRORS: others} if others else {})
