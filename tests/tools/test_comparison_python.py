"""Python models compared with Triton: the requests, and how perf_analyzer's reports are read."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.server import serving

from comparison import python_models
from comparison.analyzer import Analyzer, Asked, Server, read
from comparison.contenders import OURS
from comparison.kit import Kit
from comparison.rows import ROWS
from comparison.verdicts import verdicts
from xlaserve.dialing.over_grpc import Client

HEAD = "Concurrency,Inferences/Second,{}p50 latency,p99 latency"
SCRIPT = """#!/bin/sh
while [ "$1" != -f ]; do echo "$1"; shift; done > {asked}
cp {report} "$2"
"""


def test_rates_and_latencies_of_a_report_are_those_of_its_last_line() -> None:
    report = f"{HEAD.format('')}\n1,10,5,6\n8,50.25,1500,2500\n"

    assert {"rps": 50.2, "p50": 1.5, "p99": 2.5} == read(report)


def test_answers_are_counted_and_a_model_that_leaves_some_out_fails() -> None:
    report = f"{HEAD.format('Response Throughput,')}\n8,50,400,1500,2500\n"

    assert 400 == read(report, 8)["rps"]
    assert "400 answers/s of 50 requests/s, expected 9 each" in read(report, 9)["error"]
    assert "expected 1 each" in read(report)["error"]
    assert "reported nothing" in read(HEAD)["error"]


class Statistics(BaseHTTPRequestHandler):
    """Reports five more answered requests each time."""

    count = 0

    def do_GET(self) -> None:
        type(self).count += 5
        statistics = {"inference_stats": {"success": {"count": self.count}}}
        body = json.dumps({"model_stats": [statistics]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def statistics_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Statistics) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def kit_at(path: Path) -> Kit:
    cpu = str(min(os.sched_getaffinity(0)))
    return Kit(path / "kit", path, cpu, cpu)


def test_the_program_is_asked_for_what_a_row_says(tmp_path: Path, statistics_port: int) -> None:
    home, asked, report = tmp_path / "pa", tmp_path / "asked", tmp_path / "report"
    home.mkdir()
    report.write_text(f"{HEAD.format('')}\n8,50,1500,2500\n")
    program = home / "perf_analyzer"
    program.write_text(SCRIPT.format(asked=asked, report=report))
    program.chmod(0o755)
    analyzer = Analyzer(kit_at(tmp_path))
    analyzer.check()
    server = Server(1, statistics_port, os.getpid())
    found = analyzer.measure(server, Asked("m", ("--streaming",)), "http", 64, 3)

    assert 50 == found["rps"]
    assert {"cpu_us", "server_cpu", "client_cpu", "other_cpu"} < found.keys()
    flags = asked.read_text().split()
    assert ["-m", "m", "--streaming", "-u", f"127.0.0.1:{statistics_port}", "-i", "http"] == flags[
        :7
    ]
    assert "64" == flags[flags.index("--concurrency-range") + 1]

    report.unlink()
    assert "error" in analyzer.measure(server, Asked("m", ()), "grpc", 64, 3)


def test_a_program_that_is_missing_is_said_with_what_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"perf_analyzer is not there, run PEERS_CACHE=.* fetch"):
        Analyzer(kit_at(tmp_path)).check()


def test_rows_of_python_models_stand_beside_triton_in_rate_and_processor_time() -> None:
    rows = [row for row in ROWS if row.is_python]
    analyzed = [row for row in rows if row.analyzed is not None]
    numbers = {OURS: {"rps": 30.0, "cpu_us": 30.0}, "triton": {"rps": 10.0, "cpu_us": 91.0}}

    assert ("python", 64) == (rows[0].name, rows[0].in_flight)
    assert {"grpc", "http"} == {row.protocol for row in analyzed}
    for row in analyzed:
        assert [True, True] == [one.is_met for one in verdicts(row, numbers, ["triton"], 0)]


async def test_the_models_answer_as_the_comparison_asks(tmp_path: Path) -> None:
    """Triton serves the same files."""
    python_models.make(tmp_path / "models")
    python_models.write_body(tmp_path / "bodies")

    body = (tmp_path / "bodies/add_sub.grpc").read_bytes()
    assert len(body) - 5 == int.from_bytes(body[1:5])
    assert {"model": "add_sub"} == json.loads((tmp_path / "bodies/add_sub.meta").read_text())
    async with (
        serving(
            tmp_path, tmp_path / "models", load_model=("*",), allow_python_models=True
        ) as server,
        Client(server.url, timeout=60) as client,
    ):
        await python_models.ask(client)
        assert ["OUT", "IDX"] == [spec.name for spec in (await client.tensors("repeat")).outputs]
