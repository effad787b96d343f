"""h2spec, the conformance tests of HTTP/2 and HPACK, against the engine.

Many of its cases need an answer with a body, which a gRPC server gives to none of h2spec's
requests. So the engine is under plain HTTP here, and no case is skipped.
"""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.engines import own_engine_only
from support.go_tools import go_program
from support.plain import plain_server
from support.process import run_bytes

H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
PARTS = ("generic", "http2", "hpack")
CASES = 146
TIMEOUT_SECONDS = "2"


@pytest.fixture(scope="session")
def h2spec(pytestconfig: pytest.Config) -> str:
    return go_program(pytestconfig, "h2spec", H2SPEC)


@own_engine_only
@pytest.mark.slow
async def test_every_case_passes(h2spec: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    async with plain_server() as port:
        await run_bytes(
            h2spec, *PARTS, "--strict", "-p", str(port), "-o", TIMEOUT_SECONDS, "-j", str(report)
        )
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [_told(case) for case in cases if any(True for _ in case)]

    assert CASES == len(cases)
    assert [] == failed


def _told(case: ElementTree.Element) -> str:
    """Say which case it is, and what became of it: a failure, an error or a skip."""
    outcomes = ", ".join(f"{part.tag} {' '.join((part.text or '').split())}" for part in case)
    return f"{case.get('package')}: {case.get('classname')}: {outcomes}"
