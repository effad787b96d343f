"""Write deploy/grafana and deploy/prometheus from tables, or prove that they are fresh (`--check`).

    python tools/dashboards.py [--check]

Every metric in an expression must exist in the server; `problems` lists those that do not.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metrics_page

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
DASHBOARD = DEPLOY / "grafana" / "xlaserve.json"
RULES = DEPLOY / "prometheus" / "xlaserve.rules.yaml"

_NAME = re.compile(r"\b(?:xlaserve|nv|process)_[a-z0-9_]+")
_OF_HISTOGRAM = ("_bucket", "_count", "_sum")
_CHOSEN = 'job=~"$job",instance=~"$instance"'
_OF_MODEL = f'{_CHOSEN},model=~"$model"'
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: title, Grafana unit, and one line per expression."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    """Legend and expression of each line; SERVER and MODEL are placeholders for the selection."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule: when an operator has to look."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str


def _quantile(share: float) -> str:
    buckets = "sum by (model, le) (rate(xlaserve_request_seconds_bucket{MODEL}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})"


def _of_tokens(share: float, which: str) -> str:
    name = f"xlaserve_generation_{which}_seconds_bucket"
    buckets = f"sum by (model, le) (rate({name}{{MODEL}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})"


def _rate(metric: str, by: str, chosen: str = "MODEL") -> str:
    return f"sum by ({by}) (rate({metric}{{{chosen}}}[$__rate_interval]))"


PANELS: tuple[Panel, ...] = (
    Panel("Requests", "reqps", (("{{model}}", _rate("nv_inference_request_success", "model")),)),
    Panel(
        "Failures of models",
        "reqps",
        (("{{model}} {{reason}}", _rate("nv_inference_request_failure", "model, reason")),),
    ),
    Panel(
        "Failures by reason",
        "reqps",
        (("{{reason}}", _rate("xlaserve_refusals_total", "reason", "SERVER")),),
    ),
    Panel("Median time", "s", (("{{model}}", _quantile(0.5)),)),
    Panel("99 % are answered within", "s", (("{{model}}", _quantile(0.99)),)),
    Panel(
        "Time by phase",
        "s",
        tuple(
            (
                phase,
                f"1e-6 * sum(rate(nv_inference_{phase}_duration_us{{MODEL}}[$__rate_interval])) / "
                "sum(rate(nv_inference_request_success{MODEL}[$__rate_interval]))",
            )
            for phase in ("queue", "compute_input", "compute_infer", "compute_output")
        ),
    ),
    Panel(
        "Waiting",
        "short",
        (("{{model}}", "sum by (model) (nv_inference_pending_request_count{MODEL})"),),
    ),
    Panel(
        "Oldest that waits",
        "s",
        (("{{model}}", "max by (model) (xlaserve_queue_age_seconds{MODEL})"),),
    ),
    Panel(
        "In progress",
        "short",
        (("{{model}}", "sum by (model) (xlaserve_requests_in_progress{MODEL})"),),
    ),
    Panel(
        "Rows of a batch",
        "short",
        (
            (
                "{{model}}",
                f"{_rate('nv_inference_count', 'model')} / "
                f"{_rate('nv_inference_exec_count', 'model')}",
            ),
        ),
    ),
    Panel(
        "Executions by bucket",
        "ops",
        (("{{model}} {{rows}}", _rate("xlaserve_bucket_executions_total", "model, rows")),),
    ),
    Panel("Padding", "rowsps", (("{{model}}", _rate("xlaserve_padding_rows_total", "model")),)),
    Panel(
        "Response cache",
        "reqps",
        (
            ("hits {{model}}", _rate("nv_cache_num_hits_per_model", "model")),
            ("misses {{model}}", _rate("nv_cache_num_misses_per_model", "model")),
        ),
    ),
    Panel(
        "Time to the first token",
        "s",
        (
            ("{{model}} 50 %", _of_tokens(0.5, "first_token")),
            ("{{model}} 99 %", _of_tokens(0.99, "first_token")),
        ),
    ),
    Panel(
        "Time between tokens",
        "s",
        (
            ("{{model}} 50 %", _of_tokens(0.5, "token")),
            ("{{model}} 99 %", _of_tokens(0.99, "token")),
        ),
    ),
    Panel(
        "Tokens",
        "cps",
        (
            ("answers {{model}}", _rate("xlaserve_generation_output_tokens_total", "model")),
            ("prompts {{model}}", _rate("xlaserve_generation_prompt_tokens_total", "model")),
            ("cached {{model}}", _rate("xlaserve_generation_cached_tokens_total", "model")),
        ),
    ),
    Panel(
        "Generators: requests running and waiting",
        "short",
        (
            ("running {{model}}", "sum by (model) (xlaserve_generation_running{MODEL})"),
            ("waiting {{model}}", "sum by (model) (xlaserve_generation_waiting{MODEL})"),
            ("slots {{model}}", "sum by (model) (xlaserve_generation_slots{MODEL})"),
        ),
    ),
    Panel(
        "Cache positions in use",
        "percentunit",
        (
            (
                "{{model}}",
                "sum by (model) (xlaserve_generation_positions_used{MODEL}) / "
                "sum by (model) (xlaserve_generation_positions{MODEL})",
            ),
        ),
    ),
    Panel(
        "Generators: steps and preemptions",
        "ops",
        (
            ("steps {{model}}", _rate("xlaserve_generation_steps_total", "model")),
            ("preemptions {{model}}", _rate("xlaserve_generation_preemptions_total", "model")),
        ),
    ),
    Panel(
        "Memory of models by device",
        "bytes",
        (
            ("used {{device}}", "sum by (device) (xlaserve_device_capacity_used_bytes{SERVER})"),
            ("there is {{device}}", "sum by (device) (xlaserve_device_capacity_bytes{SERVER})"),
        ),
    ),
    Panel(
        "Memory by model and device",
        "bytes",
        (("{{model}} {{device}}", "sum by (model, device) (xlaserve_model_device_bytes{MODEL})"),),
    ),
    Panel(
        "Memory that clients hold",
        "bytes",
        (
            ("{{kind}}", "sum by (kind) (xlaserve_held_bytes{SERVER})"),
            ("limit", "sum(xlaserve_held_limit_bytes{SERVER})"),
        ),
    ),
    Panel(
        "Compilation",
        "s",
        (("{{model}}", "sum by (model) (xlaserve_model_compile_seconds{MODEL})"),),
    ),
    Panel(
        "Loads",
        "short",
        (
            ("loads", "sum(increase(xlaserve_model_loads_total{MODEL}[$__rate_interval]))"),
            (
                "failures",
                "sum(increase(xlaserve_model_load_failures_total{MODEL}[$__rate_interval]))",
            ),
            ("unloads", "sum(increase(xlaserve_model_unloads_total{MODEL}[$__rate_interval]))"),
        ),
    ),
    Panel(
        "Lag of the event loop",
        "s",
        (
            (
                "99 %",
                "histogram_quantile(0.99, sum by (le) "
                "(rate(xlaserve_event_loop_lag_seconds_bucket{SERVER}[$__rate_interval])))",
            ),
        ),
    ),
    Panel(
        "Connections",
        "short",
        (("{{protocol}}", "sum by (protocol) (xlaserve_connections{SERVER})"),),
    ),
    Panel("Resident memory", "bytes", (("{{instance}}", "process_resident_memory_bytes{SERVER}"),)),
    Panel(
        "Processor",
        "short",
        (("{{instance}}", "rate(process_cpu_seconds_total{SERVER}[$__rate_interval])"),),
    ),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "XlaserveModelFails",
        'sum by (model) (rate(nv_inference_request_failure{reason="BACKEND"}[5m])) / '
        "(sum by (model) (rate(nv_inference_request_success[5m])) + "
        "sum by (model) (rate(nv_inference_request_failure[5m]))) > 0.01",
        5,
        "critical",
        "More than 1 % of the requests of {{ $labels.model }} fail in the model",
    ),
    Alert(
        "XlaserveRefusesRequests",
        "sum by (instance) (rate(xlaserve_refusals_total"
        '{reason=~"Overloaded|QueueTimeout|BudgetExhausted"}[5m])) > 1',
        5,
        "warning",
        "{{ $labels.instance }} refuses {{ $value }} requests a second for want of room",
    ),
    Alert(
        "XlaserveUnexpectedErrors",
        'sum by (instance) (increase(xlaserve_refusals_total{reason="Unexpected"}[15m])) > 0',
        0,
        "critical",
        "Errors that nobody expected: the log of {{ $labels.instance }} has their tracebacks",
    ),
    Alert(
        "XlaserveSlow",
        "histogram_quantile(0.99, sum by (model, le) "
        "(rate(xlaserve_request_seconds_bucket[5m]))) > 1",
        10,
        "warning",
        "1 % of the requests of {{ $labels.model }} take longer than a second",
    ),
    Alert(
        "XlaserveQueueOld",
        "max by (instance, model) (xlaserve_queue_age_seconds) > 5",
        2,
        "warning",
        "Requests of {{ $labels.model }} on {{ $labels.instance }} wait for more than 5 s",
    ),
    Alert(
        "XlaserveLoadsFail",
        "sum by (model) (increase(xlaserve_model_load_failures_total[15m]) > 0 or "
        # A model has no series before its first load.
        "(xlaserve_model_load_failures_total unless xlaserve_model_load_failures_total offset 15m)"
        ") > 0",
        0,
        "warning",
        "{{ $labels.model }} could not be loaded",
    ),
    Alert(
        "XlaserveMemoryNearlyFull",
        "xlaserve_device_capacity_used_bytes / xlaserve_device_capacity_bytes > 0.95",
        15,
        "warning",
        "Models fill {{ $labels.device }} of {{ $labels.instance }}",
    ),
    Alert(
        "XlaserveClientsHoldMemory",
        'sum by (instance) (xlaserve_held_bytes{kind!="spare"}) / '
        "sum by (instance) (xlaserve_held_limit_bytes) > 0.9",
        5,
        "warning",
        "Clients hold nearly all memory that {{ $labels.instance }} has for them (max_held_bytes)",
    ),
    Alert(
        "XlaserveEventLoopLate",
        "histogram_quantile(0.99, sum by (instance, le) "
        "(rate(xlaserve_event_loop_lag_seconds_bucket[5m]))) > 0.1",
        10,
        "warning",
        "The event loop of {{ $labels.instance }} is late by a tenth of a second",
    ),
    Alert(
        "XlaserveThreadsStuck",
        "xlaserve_abandoned_work > 0",
        30,
        "warning",
        "{{ $labels.instance }} has threads that do not end",
    ),
    Alert(
        "XlaserveRepositoryUnreadable",
        "xlaserve_repository_readable == 0",
        5,
        "critical",
        "{{ $labels.instance }} cannot read its repository",
    ),
    Alert(
        "XlaserveStoreAway",
        "xlaserve_store_readable == 0",
        5,
        "critical",
        "{{ $labels.instance }} gets no answer of {{ $labels.store }}",
    ),
    Alert(
        "XlaserveFewDescriptors",
        "process_open_fds / process_max_fds > 0.9",
        5,
        "warning",
        "{{ $labels.instance }} has nearly all files open that it may",
    ),
)


def dashboard() -> str:
    """Return the dashboard for import into Grafana."""
    panels = [_panel(number, panel) for number, panel in enumerate(PANELS)]
    shown = {
        "title": "xlaserve",
        "uid": "xlaserve",
        "schemaVersion": 39,
        "tags": ["xlaserve"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_source(), *_variables()]},
        "panels": panels,
    }
    return json.dumps(shown, indent=2) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": expression.replace("MODEL", _OF_MODEL).replace("SERVER", _CHOSEN),
            "legendFormat": legend,
        }
        for index, (legend, expression) in enumerate(panel.lines)
    ]
    place = {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variables() -> Iterable[dict[str, Any]]:
    ready = "xlaserve_model_ready"
    for name, within in (
        ("job", ""),
        ("instance", 'job=~"$job"'),
        ("model", _CHOSEN),
    ):
        yield {
            "name": name,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "query": f"label_values({ready}{{{within}}}, {name})",
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        }


def rules() -> str:
    """Return the alert rules in Prometheus' format."""
    lines = [
        "# Made by tools/dashboards.py.",
        "groups:",
        "  - name: xlaserve",
        "    rules:",
    ]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.minutes}m",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
        ]
    return "\n".join(lines) + "\n"


def problems() -> list[str]:
    """Return the metrics in expressions that the server does not have."""
    known = metrics_page.names()
    expressions = [expression for panel in PANELS for _, expression in panel.lines]
    expressions += [alert.expression for alert in ALERTS]
    asked = {name for expression in expressions for name in _NAME.findall(expression)}
    return sorted(name for name in asked if not _is_known(name, known))


def _is_known(name: str, known: set[str]) -> bool:
    stem = next((name.removesuffix(end) for end in _OF_HISTOGRAM if name.endswith(end)), name)
    return name in known or stem in metrics_page.histograms()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    check = parser.parse_args().check
    if unknown := problems():
        print(f"the server has no metric {', '.join(unknown)}")
        return 1
    stale = 0
    for path, text in ((DASHBOARD, dashboard()), (RULES, rules())):
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.relative_to(DEPLOY.parent)} is stale: run tools/dashboards.py")
            stale = 1
    if check and not stale:
        print("deploy/grafana and deploy/prometheus are fresh")
    return stale


if __name__ == "__main__":
    sys.exit(main())
