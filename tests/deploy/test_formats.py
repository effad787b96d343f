"""The model formats named by the manifests and the ModelMesh page are those that load."""

from pathlib import Path

import pytest
import yaml

from xlaserve.runtime.loaders import FORMATS

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted(
    path
    for path in (ROOT / "deploy").rglob("*.yaml")
    if "supportedModelFormats" in path.read_text()
)


def test_there_are_manifests() -> None:
    assert {"modelmesh", "kserve"} <= {path.parent.name for path in MANIFESTS}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_manifest_names_every_format(path: Path) -> None:
    spec = yaml.safe_load(path.read_text())["spec"]

    assert set(FORMATS) == {row["name"] for row in spec["supportedModelFormats"]}


def test_the_page_names_every_format() -> None:
    text = (ROOT / "docs/modelmesh.md").read_text()

    assert [] == [name for name in FORMATS if f"| `{name}` |" not in text]
