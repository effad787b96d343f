"""The dashboard and the alert rules ask for metrics that the server has."""

import json
import subprocess

import pytest
import yaml
from support import tools

import dashboards


def test_they_are_fresh() -> None:
    assert dashboards.dashboard() == dashboards.DASHBOARD.read_text()
    assert dashboards.rules() == dashboards.RULES.read_text()


def test_every_metric_that_they_name_is_there() -> None:
    assert [] == dashboards.problems()


def test_a_metric_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dashboards.Panel("Gone", "s", (("gone", "rate(xlaserve_gone_total{MODEL}[1m])"),))
    part = dashboards.Panel("Part", "s", (("part", "xlaserve_request_seconds"),))
    whole = dashboards.Panel("Sum", "s", (("sum", "xlaserve_connections_sum{SERVER}"),))
    monkeypatch.setattr(dashboards, "PANELS", (gone, part, whole))

    assert ["xlaserve_connections_sum", "xlaserve_gone_total"] == dashboards.problems()


def test_the_dashboard_is_one_of_grafana() -> None:
    shown = json.loads(dashboards.DASHBOARD.read_text())
    panels = shown["panels"]

    assert len(dashboards.PANELS) == len({panel["id"] for panel in panels})
    assert len(panels) == len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels})
    assert ["source", "job", "instance", "model"] == [
        variable["name"] for variable in shown["templating"]["list"]
    ]
    assert all("MODEL" not in t["expr"] and "{" in t["expr"] for p in panels for t in p["targets"])


def test_the_rules_are_those_of_prometheus() -> None:
    (group,) = yaml.safe_load(dashboards.RULES.read_text())["groups"]

    assert [alert.name for alert in dashboards.ALERTS] == [rule["alert"] for rule in group["rules"]]
    assert [alert.expression for alert in dashboards.ALERTS] == [
        rule["expr"] for rule in group["rules"]
    ]


def test_promtool_accepts_the_rules() -> None:
    promtool = tools.program("promtool")
    checked = subprocess.run(
        [promtool, "check", "rules", str(dashboards.RULES)],
        capture_output=True,
        check=False,
        text=True,
    )

    assert 0 == checked.returncode, checked.stdout + checked.stderr


def test_generators_have_panels() -> None:
    shown = json.dumps([panel.lines for panel in dashboards.PANELS])

    assert [] == [
        name
        for name in (
            "xlaserve_generation_first_token_seconds_bucket",
            "xlaserve_generation_token_seconds_bucket",
            "xlaserve_generation_output_tokens_total",
            "xlaserve_generation_prompt_tokens_total",
            "xlaserve_generation_running",
            "xlaserve_generation_waiting",
            "xlaserve_generation_positions_used",
        )
        if name not in shown
    ]
