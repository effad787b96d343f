"""h2spec, the conformance tests of HTTP/2 and HPACK: all cases of its strict mode, none skipped.

Run against the gRPC server, which answers h2spec's requests with 405 and 415, and against the
engine serving plain HTTP, which answers with 200.
"""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.engines import own_engine_only
from support.frames import LARGEST_FRAME
from support.go_tools import go_program
from support.plain import plain_server
from support.process import run_bytes
from support.server import Serve

H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
PARTS = ("generic", "http2", "hpack")
CASES = 146
TIMEOUT_SECONDS = "2"


@pytest.fixture(scope="session")
def h2spec(pytestconfig: pytest.Config) -> str:
    return go_program(pytestconfig, "h2spec", H2SPEC)


async def failures(h2spec: str, port: str, report: Path) -> list[str]:
    """Run every case against a port; return the failed ones with their results."""
    await run_bytes(
        h2spec, *PARTS, "--strict", "-p", port, "-o", TIMEOUT_SECONDS, "-j", str(report)
    )
    cases = list(ElementTree.parse(report).iter("testcase"))

    assert CASES == len(cases)
    return [_told(case) for case in cases if any(True for _ in case)]


@own_engine_only
async def test_every_case_passes_against_the_server(
    h2spec: str, serve: Serve, tmp_path: Path
) -> None:
    """One case assumes that the smallest maximum frame size was announced (4.2)."""
    async with serve(tmp_path, max_frame_bytes=LARGEST_FRAME) as server:
        port = server.url.rpartition(":")[2]

        assert [] == await failures(h2spec, port, tmp_path / "report.xml")


@own_engine_only
async def test_every_case_passes_against_the_engine(h2spec: str, tmp_path: Path) -> None:
    async with plain_server() as port:
        assert [] == await failures(h2spec, str(port), tmp_path / "report.xml")


def _told(case: ElementTree.Element) -> str:
    """Describe a case and its result: failure, error or skip."""
    outcomes = ", ".join(f"{part.tag} {' '.join((part.text or '').split())}" for part in case)
    return f"{case.get('package')}: {case.get('classname')}: {outcomes}"
