"""Startup logs each fact once, however many models are loaded."""

import json
from collections import Counter
from pathlib import Path

import pytest
from support import identity_models
from support.process import served

MODELS = tuple(f"model-{number}" for number in range(4))
PLACES = {
    # A user without a home directory, as in a container with another user id.
    "no place for programs": {
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": "/proc/none",
        "XLASERVE_COMPILATION_CACHE_DIRECTORY": "auto",
    },
    "nothing amiss": {},
}


@pytest.mark.parametrize("place", PLACES)
async def test_no_line_of_a_start_is_there_twice(tmp_path: Path, place: str) -> None:
    for name in MODELS:
        identity_models.write(tmp_path / "models", name, "FP32")
    async with served(tmp_path / "models", **PLACES[place]) as server:
        log = list(server.log)
    lines = Counter(
        json.dumps({key: value for key, value in record.items() if key != "timestamp"})
        for record in log
    )

    assert {*MODELS} <= {record.get("model") for record in log}
    assert {} == {line: count for line, count in lines.items() if count > 1}
    kept = "compiled programs not kept"
    assert ("HOME" in PLACES[place]) is any(record["event"] == kept for record in log)
