"""The OpenMetrics format, read back by prometheus-client's strict parser."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser
from support import identity_models
from support.http import Answer, connect, message
from support.server import Serve

from xlaserve.http.metrics.metrics import METRICS_TYPE
from xlaserve.http.metrics.openmetrics import OPENMETRICS_TYPE, exemplar_text, to_openmetrics
from xlaserve.serving.observability.exemplar import Exemplar

read_openmetrics: Any = parser.text_string_to_metric_families
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""The Accept header of Prometheus 3."""
BY_WEIGHT = "text/plain;q=0.3, application/openmetrics-text;q=0.6"
AGAINST = "application/openmetrics-text;q=0.4, text/plain;q=0.5"
EXCLUDED = "application/openmetrics-text;q=0, */*;q=0.1"


async def test_the_server_answers_in_the_format_that_a_client_prefers(
    serve: Serve, tmp_path: Path
) -> None:
    """With all metrics of the server, each once; the text format is unchanged."""
    models = tmp_path / "models"
    identity_models.write(models, "a_bucket{le=", "FP32")
    texts = ["", "text/plain", "*/*", AGAINST, EXCLUDED]
    accepts = [*texts, PROMETHEUS, BY_WEIGHT, "application/openmetrics-text"]
    found: list[Answer] = []
    async with serve(models, http_endpoint="port:0", load_model=("*",)) as server:
        assert server.http is not None
        _, instance = server.application.registry.resolve("a_bucket{le=")
        statistics = server.application.registry.version("a_bucket{le=", "1").statistics
        assert instance is not None
        statistics.relayed(_Ran(), _Ran(), 2_000_000, 0)
        statistics.traced(0xABC, 2_000_000, 5_000_000_000)
        for accept in accepts:
            async with connect(server.http) as client:
                found.append(await client.ask(message("GET", "/metrics", ("Accept", accept))))
    kinds = [answer.headers["content-type"] for answer in found]
    families = list(read_openmetrics(found[-1].body.decode()))
    samples = {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families
        for sample in family.samples
    }
    plain = {
        line.partition(" ")[0].partition("{")[0]
        for line in found[0].body.decode().split("\n")
        if line and line[0] != "#"
    }
    exemplars = [
        (sample.labels["le"], sample.exemplar)
        for family in families
        for sample in family.samples
        if sample.exemplar is not None
    ]

    assert [METRICS_TYPE] * 5 + [OPENMETRICS_TYPE] * 3 == kinds
    assert found[-1].body.endswith(b"\n# EOF\n")
    assert 1 == found[-1].body.count(b"# EOF")
    assert b"# {" not in found[0].body
    assert plain == {name for name, _ in samples}
    ((le, exemplar),) = exemplars
    assert "0.0025" == le
    assert ({"trace_id": f"{0xABC:032x}"}, 0.002, 5.0) == (
        exemplar.labels,
        exemplar.value,
        float(str(exemplar.timestamp)),
    )
    assert len(samples) == sum(len(family.samples) for family in families)


class _Ran:
    """A request answered from the cache within two milliseconds."""

    rows = 1
    started_ns = submitted_ns = 0
    hit_ns = 1
    miss_ns = None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# TYPE a_total counter\na_total 1\n", "# TYPE a counter\na_total 1\n"),
        ("# TYPE a counter\na 1\n", "# TYPE a unknown\na 1\n"),
        ('# HELP a x "y"\n# TYPE a gauge\n', '# TYPE a gauge\n# HELP a x \\"y\\"\n'),
        ('a_bucket{le="1"} 2\n', 'a_bucket{le="1.0"} 2\n'),
        ('a_bucket{b="le=",le="+Inf"} 2\n', 'a_bucket{b="le=",le="+Inf"} 2\n'),
        ('a{b="a_bucket{le=\u2028"} 2\n', 'a{b="a_bucket{le=\u2028"} 2\n'),
    ],
)
def test_what_differs_between_the_formats(text: str, expected: str) -> None:
    assert expected == to_openmetrics(text, {})


def test_an_exemplar_is_short() -> None:
    """Names and values of its labels have at most 128 characters (OpenMetrics 1.0.0, Exemplars)."""
    written = exemplar_text(Exemplar((1 << 128) - 1, 1 / 3, 4e9 + 1 / 3))

    assert " # {" == written[:4]
    assert len("trace_id") + 32 < 128
    assert f'trace_id="{"f" * 32}"' in written
