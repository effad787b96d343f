"""Each alert fires for its first and its second event, as Prometheus evaluates it.

The series are those of scrapes of a server: before any event, and after one event.
"""

import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
import yaml
from support import identity_models, tools
from support.calls import NotedCall
from support.executions import succeed
from support.http import ask
from support.object_server import serving_objects
from support.server import RunningServer, serving

import dashboards
from xlaserve.errors import Overloaded
from xlaserve.errors.code import ModelFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLES_PER_MINUTE = 4
QUIET, EVENT = 20, 40
"""Minutes before the first event, and between the first event and the next one or the end."""
TARGET = 'instance="here:8000",job="xlaserve"'
Scrape = Mapping[str, float]
Event = Callable[[RunningServer], Awaitable[None]]


def statistics(server: RunningServer) -> Any:
    model = server.application.registry.find("echo")
    assert model is not None
    return model.versions["1"].statistics


def ended_with(server: RunningServer, error: Exception) -> None:
    call = NotedCall(model="echo")
    with pytest.raises(type(error)), server.application.gates.passing(call):
        raise error


async def fails_in_the_model(server: RunningServer) -> None:
    statistics(server).failed(ModelFailed("echo", "no"), 1)


async def is_refused(server: RunningServer) -> None:
    ended_with(server, Overloaded("echo", 1, "max_requests_per_model"))


async def is_unexpected(server: RunningServer) -> None:
    ended_with(server, ValueError("no"))


async def takes_two_seconds(server: RunningServer) -> None:
    succeed(statistics(server), 1, (0, 0, 0, 0, 2_000_000_000))


async def is_not_loaded(server: RunningServer) -> None:
    path = "/v2/repository/models/broken/load"
    assert 400 == (await ask(str(server.http), "POST", path)).status


async def is_late(server: RunningServer) -> None:
    for _ in range(10):
        server.application.observing.lag.note(2.0)


@dataclass(frozen=True)
class Single:
    """A single event, which increments counters once."""

    happens: Event


@dataclass(frozen=True)
class Lasting:
    """Events that continue for a while: this many per scrape."""

    happens: Event
    per_scrape: int = 1


@dataclass(frozen=True)
class State:
    """A lasting state: returns the series' new value, given the current one."""

    series: str
    becomes: Callable[[Scrape], float]


Happening: TypeAlias = Single | Lasting | State


def of_limit(limit: str) -> Callable[[Scrape], float]:
    return lambda scrape: next(value for row, value in scrape.items() if row.startswith(limit))


EVENTS: Mapping[str, Happening] = {
    "XlaserveModelFails": Lasting(fails_in_the_model),
    "XlaserveRefusesRequests": Lasting(is_refused, 30),
    "XlaserveUnexpectedErrors": Single(is_unexpected),
    "XlaserveSlow": Lasting(takes_two_seconds),
    "XlaserveQueueOld": State("xlaserve_queue_age_seconds", lambda _: 9.0),
    "XlaserveLoadsFail": Single(is_not_loaded),
    "XlaserveMemoryNearlyFull": State(
        "xlaserve_device_capacity_used_bytes", of_limit("xlaserve_device_capacity_bytes")
    ),
    "XlaserveClientsHoldMemory": State(
        'xlaserve_held_bytes{kind="requests"', of_limit("xlaserve_held_limit_bytes")
    ),
    "XlaserveEventLoopLate": Lasting(is_late),
    "XlaserveThreadsStuck": State("xlaserve_abandoned_work", lambda _: 1.0),
    "XlaserveRepositoryUnreadable": State("xlaserve_repository_readable", lambda _: 0.0),
    "XlaserveStoreAway": State("xlaserve_store_readable", lambda _: 0.0),
    "XlaserveFewDescriptors": State("process_open_fds", of_limit("process_max_fds")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("alerts")
    models = folder / "models"
    identity_models.write(models, "echo", "FP32")
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text("{")
    with serving_objects(**{"root/far/config.json": b"{}"}) as (url, _):
        running = serving(
            folder,
            models,
            model_repository=(url,),
            remote_schemes=("http",),
            remote_cache_directory=str(folder / "cache"),
            http_endpoint="port:0",
            load_model=("echo",),
        )
        async with running as server:
            yield server


async def scrape(server: RunningServer) -> Scrape:
    text = (await ask(str(server.http), "GET", "/metrics")).body.decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {row: float(value) for row, _, value in rows}


def targeted(row: str) -> str:
    """Add the labels of its target to a row, as Prometheus does."""
    name, brace, labels = row.partition("{")
    return f"{name}{{{TARGET},{labels}" if brace else f"{name}{{{TARGET}}}"


def steady(value: float | None, minutes: int) -> str:
    count = minutes * SAMPLES_PER_MINUTE
    return f"_x{count}" if value is None else f"{value!r}+0x{count - 1}"


def rising(value: float, step: float, minutes: int) -> str:
    return f"{value!r}+{step!r}x{minutes * SAMPLES_PER_MINUTE - 1}"


def values(
    event: Single | Lasting | State, row: str, before: Scrape, after: Scrape, busy: int
) -> str:
    """Return the series' values: quiet, the first event or some minutes of it, and the second."""
    old = before.get(row)
    if isinstance(event, State):
        if not row.startswith(event.series):
            return steady(old, QUIET + 2 * EVENT)
        assert old is not None
        bad = event.becomes(before)
        parts = [steady(old, QUIET)]
        for _ in range(2):
            parts += [steady(bad, busy), steady(old, EVENT - busy)]
        return " ".join(parts)
    new = after.get(row, 0.0)
    step = new - (old or 0.0)
    if isinstance(event, Single):
        return " ".join([steady(old, QUIET), steady(new, EVENT), steady(new + step, EVENT)])
    step *= event.per_scrape
    count = busy * SAMPLES_PER_MINUTE
    first = (old or 0.0) + step
    parts = [steady(old, QUIET)]
    for number in range(2):
        begin = first + number * step * (count - 1)
        parts += [rising(begin, step, busy), steady(begin + step * (count - 1), EVENT - busy)]
    return " ".join(parts)


def evaluated(folder: Path, alert: dashboards.Alert, series: Sequence[Mapping[str, str]]) -> None:
    """Have Prometheus evaluate the rules at four times: quiet, fired, quiet again, fired again."""
    begun = [QUIET, QUIET + EVENT]
    within = alert.minutes + 6
    (group,) = yaml.safe_load(dashboards.RULES.read_text())["groups"]
    (rule,) = [rule for rule in group["rules"] if rule["alert"] == alert.name]
    # Promtool compares all labels, so the rule may only have those that its expression keeps.
    (folder / "rule.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "x", "rules": [{**rule, "labels": {}}]}]})
    )
    checks = [(QUIET - 1, 0), *((at + within, 1) for at in begun), (QUIET + EVENT - 1, 0)]
    name = f'ALERTS{{alertname="{alert.name}",alertstate="firing"}}'
    test = {
        "rule_files": ["rule.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": list(series),
                "promql_expr_test": [
                    {
                        "expr": f"(count({name}) > bool 0) or vector(0)",
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for minute, value in checks
                ],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    ran = subprocess.run(
        [tools.program("promtool"), "test", "rules", "test.yaml"],
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr


async def test_every_alert_has_its_event(server: RunningServer) -> None:
    assert {alert.name for alert in dashboards.ALERTS} == set(EVENTS)


@pytest.mark.parametrize("alert", dashboards.ALERTS, ids=lambda alert: alert.name)
async def test_an_alert_fires_for_its_first_event_and_its_second(
    server: RunningServer, tmp_path: Path, alert: dashboards.Alert
) -> None:
    event = EVENTS[alert.name]
    before = await scrape(server)
    if not isinstance(event, State):
        await event.happens(server)
    after = await scrape(server)
    busy = alert.minutes + 8
    names = {*dashboards._NAME.findall(alert.expression)}
    rows = [row for row in {**before, **after} if row.partition("{")[0] in names]
    series = [
        {"series": targeted(row), "values": values(event, row, before, after, busy)} for row in rows
    ]

    assert rows, f"no row of {sorted(names)}"
    evaluated(tmp_path, alert, series)
