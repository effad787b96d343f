import jax
import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.offline.targets import wheels
from xlaserve.runtime.devices import plugins
from xlaserve.runtime.devices.target_kinds import named


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "version", lambda name: "")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("target", "wheel", "extra"),
    [("h100", "jax-cuda12-pjrt", "cuda12"), ("v5e", "libtpu", "tpu")],
)
def test_missing_wheels_are_named_with_what_installs_them(
    target: str, wheel: str, extra: str
) -> None:
    with pytest.raises(DeviceUnavailable) as refused:
        wheels.check(named(target))

    assert f"device '{target}' is not available: {wheel} is not installed" in str(refused.value)
    assert str(refused.value).endswith(f"pip install 'xlaserve[{extra}]'")


@pytest.mark.usefixtures("nothing_installed")
def test_the_cpu_takes_no_wheels() -> None:
    wheels.check(named("cpu"))


def test_what_compiles_has_versions() -> None:
    assert jax.__version__ == wheels.versions("cpu")["jax"]
    assert "jaxlib" in wheels.versions("cpu")
