"""`xlaserve plan` on a machine without the target device."""

import json
from pathlib import Path
from typing import Any

from support.process import command, run

from xlaserve.artifact.target_sizes import IN_FLIGHT


async def test_examples_are_planned_and_fit(
    platform: Any, example_models: Path, tmp_path: Path
) -> None:
    """The second run finds every model in the cache."""
    asked = (
        "plan",
        str(example_models),
        "--target",
        platform.target.name,
        "--cache",
        str(tmp_path),
    )
    status, out, err = await run(*command(*asked, "--json"))
    assert 0 == status, err
    document = json.loads(out)
    status, out, _ = await run(*command(*asked))

    models = {one["name"]: one for one in document["models"]}
    assert {"digits", "identity", "mlp", "simple"} == set(models)
    for one in models.values():
        footprints = [program["footprint"] for program in one["programs"]]
        largest = max(program["scratch_bytes"] for program in one["programs"])
        assert one["problem"] is None
        assert IN_FLIGHT == one["executions_in_flight"]
        assert IN_FLIGHT * largest == one["reserved"]["temporaries_bytes"]
        assert all(footprint["code_bytes"] for footprint in footprints)
        assert [f"{platform.name}:0"] == list(one["reserved"]["per_device"])
        assert one["predicted_bytes"]
    assert [1, 2, 3, 4, 6, 8] == [program["rows"] for program in models["simple"]["programs"]]
    assert document["fits_together"]
    assert 0 < document["mesh"]["capacity_bytes"] < document["capacity_bytes"]
    assert 0 == status
    assert "All models that compile fit together." in out
    assert out.count(" known ") == sum(len(one["programs"]) for one in models.values())
