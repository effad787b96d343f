"""Conversion of Prometheus' text format to OpenMetrics 1.0.0, with exemplars of requests.

Names are unchanged, so that a scraper that switches formats continues the same series. A counter
whose name does not end in `_total`, such as Triton's, therefore has the type unknown (OpenMetrics
1.0.0, Counter).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client.utils import floatToGoString

from xlaserve.serving.observability.exemplar import Exemplar

OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The media type of the format."""
END = b"# EOF\n"

_TOTAL = "_total"
_written: Callable[[float], str] = floatToGoString
_BUCKET = re.compile(
    r'(?P<row>(?P<start>[a-zA-Z_:][a-zA-Z0-9_:]*_bucket\{(.*,)?le=")(?P<le>[^"]*)")'
    r"\} (?P<value>.*)",
    re.DOTALL,
)

Exemplars: TypeAlias = Mapping[str, str]
"""Serialized exemplars, by the name and labels of their row."""


def exemplar_text(exemplar: Exemplar) -> str:
    """Return an exemplar as appended to a row; it uses 43 of at most 128 characters."""
    label = f'trace_id="{exemplar.trace_id:032x}"'
    return f" # {{{label}}} {exemplar.seconds} {exemplar.at:.3f}"


def to_openmetrics(text: str, exemplars: Exemplars) -> str:
    """Convert families from the Prometheus text format to OpenMetrics."""
    return "".join(f"{line}\n" for line in _lines(text.split("\n"), exemplars) if line)


def _lines(lines: Iterable[str], exemplars: Exemplars) -> Iterator[str]:
    help_text = ""
    for line in lines:
        if line.startswith("# HELP "):
            help_text = line.split(" ", 3)[3]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            family = name.removesuffix(_TOTAL) if kind == "counter" else name
            if kind == "counter" and family == name:
                kind = "unknown"
            yield f"# TYPE {family} {kind}"
            if help_text:
                yield f"# HELP {family} " + help_text.replace('"', '\\"')
            help_text = ""
        else:
            bucket = _BUCKET.fullmatch(line)
            yield line if bucket is None else _bucket(bucket, exemplars)


def _bucket(found: "re.Match[str]", exemplars: Exemplars) -> str:
    """Return the row of a bucket, with its bound as a float as OpenMetrics requires: 1.0, not 1."""
    bound = _written(float(found["le"]))
    return f'{found["start"]}{bound}"}} {found["value"]}{exemplars.get(found["row"], "")}'
