"""Requests generated from the OpenAPI description: the responses match the description."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.process import served

REPORT = "report.json"

REQUESTS = int(os.environ.get("SCHEMATHESIS_REQUESTS", "8"))
"""Number of requests for each operation and kind of fault; boundary cases are added to these."""

CASES = int(os.environ.get("SCHEMATHESIS_CASES", "800"))
"""Minimum number of requests in total."""

SEED = os.environ.get("SCHEMATHESIS_SEED", "1")

CONFIGURATION = """
[dictionaries]
models.values = ["identity", "simple", "digits"]
versions.values = ["1"]
datatypes.values = ["FP32", "INT32", "BYTES"]

[parameters]
"path.model" = {{ dictionary = "models", probability = 0.6 }}
"path.version" = {{ dictionary = "versions", probability = 0.6 }}

[checks]
# 501, 503 and 507 say what is missing: a part of the protocol, a ready model, memory.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501, 503, 507]
# No schema says which tensors a model takes, or which names are loaded.
positive_data_acceptance.enabled = false

[[operations]]
# A parameter of a query that nobody describes is left alone: proxies add theirs.
include-path = ["/models", "/page/events"]
checks.negative_data_rejection.enabled = false

[phases]
stateful.enabled = false
examples.fill-missing = true

[generation]
max-examples = {requests}
"""


@pytest.mark.slow
async def test_every_answer_is_as_the_description_says(
    example_models: Path, tmp_path: Path
) -> None:
    """No 5xx except 501, 503 and 507, and no undescribed status, media type, header or form."""
    repository = tmp_path / "models"
    shutil.copytree(example_models, repository)
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION.format(requests=REQUESTS))
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    async with served(repository, *flags) as server:
        # Read the log while it is written, since its pipe would fill up otherwise.
        reading = asyncio.create_task(server.until("stopped"))
        status, output = await _schemathesis(f"http://{server.http}/v2/docs/openapi.json", tmp_path)
        reading.cancel()
        await asyncio.wait([reading])
        await server.stop()
    faults = [r for r in server.log if r.get("event") == "unexpected exception"]

    report = json.loads((tmp_path / REPORT).read_text())
    operations, cases = report["operations"], report["test_cases"]

    assert not status, output
    assert operations["total"] == operations["tested"]
    assert cases["generated"] >= CASES
    assert [] == faults


async def _schemathesis(url: str, directory: Path) -> tuple[int | None, str]:
    arguments = ("--continue-on-failure", "--no-color", "--seed", SEED, "--warnings", "off")
    reports = ("--report", "json", "--report-json-path", REPORT)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", url, *arguments, *reports),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    report, _ = await process.communicate()
    return process.returncode, report.decode()
