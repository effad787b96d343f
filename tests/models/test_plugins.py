"""Which wheels provide an accelerator plugin, and what to install if none does."""

import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.offline.targets import wheels
from xlaserve.runtime.devices import device_problems, plugins
from xlaserve.runtime.devices.target_kinds import named


@pytest.fixture
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate that only these packages are installed."""
    monkeypatch.setattr(plugins, "version", dict.fromkeys(request.param, "1.2").get)


PJRT, PLUGIN = "jax-cuda13-pjrt", "jax-cuda13-plugin"


@pytest.mark.parametrize(
    ("installed", "runs", "compiles"),
    [
        ((), "jax-cuda12-plugin is not installed: pip install 'xlaserve[cuda12]'", "cuda12"),
        ((PJRT,), "jax-cuda13-plugin is not installed: pip install 'xlaserve[cuda13]'", ""),
        ((PLUGIN,), "", "cuda13"),
        ((PJRT, PLUGIN), "", ""),
        (("jax-cuda12-pjrt", "jax-cuda12-plugin"), "", ""),
    ],
    indirect=["installed"],
)
@pytest.mark.usefixtures("installed")
def test_the_text_names_the_extra_that_is_there_in_part(runs: str, compiles: str) -> None:
    assert runs == plugins.missing("cuda")
    assert not runs or runs == device_problems.reason("cuda", "cpu", [])
    if compiles:
        with pytest.raises(DeviceUnavailable, match=rf"xlaserve\[{compiles}\]"):
            wheels.check(named("h100"))
    else:
        wheels.check(named("h100"))


@pytest.mark.parametrize("installed", [(PJRT, PLUGIN, "jaxlib")], indirect=True)
@pytest.mark.usefixtures("installed")
def test_what_compiles_is_told_from_what_runs() -> None:
    assert {PJRT: "1.2", PLUGIN: "1.2"} == plugins.versions("cuda")
    assert {"jaxlib": "1.2", PJRT: "1.2"} == wheels.versions("cuda")
    assert {} == plugins.versions("cpu")
