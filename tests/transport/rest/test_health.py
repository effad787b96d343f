"""The metrics endpoint also answers health probes, and nothing else."""

from pathlib import Path

from structlog.testing import capture_logs
from support.http import connect, message
from support.server import serving

ANSWERED = {
    "/metrics": 200,
    "/v2/health/live": 200,
    "/v2/health/ready": 200,
    "/v2": 404,
    "/v2/models": 404,
    "/": 404,
}


async def test_the_endpoint_of_metrics(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with capture_logs() as log:
        async with serving(tmp_path, tmp_path / "models", metrics_endpoint="port:0"):
            address = next(row["metrics"] for row in log if row["event"] == "listening")
            async with connect(address) as client:
                found = {path: (await client.ask(message("GET", path))).status for path in ANSWERED}

    assert ANSWERED == found
