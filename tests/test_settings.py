"""Precedence of settings: flags over environment over defaults."""

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from xlaserve.cli import application
from xlaserve.cli.serve.settings_file import read_file
from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device, ModelControlMode
from xlaserve.settings.description import describe_settings
from xlaserve.settings.reading import REPLACED

REPOSITORY = {"XLASERVE_REPOSITORY": "/models"}


def test_the_defaults_hold() -> None:
    settings = Settings.read(REPOSITORY)

    assert (Path("/models"), "port:8001", ModelControlMode.NONE) == (
        settings.repository,
        settings.grpc_endpoint,
        settings.model_control_mode,
    )


def test_a_flag_beats_the_environment() -> None:
    environment = REPOSITORY | {"XLASERVE_HOST": "0.0.0.0", "XLASERVE_DEVICE": "cpu"}
    settings = Settings.read(environment, host="::1", device=None)

    assert ("::1", Device.CPU) == (settings.host, settings.device)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("max_connections", "7", 7),
        ("unix_socket_mode", "0o600", 0o600),
        ("poll_interval_seconds", "0.5", 0.5),
        ("model_control_mode", "poll", ModelControlMode.POLL),
        ("model_root", "/a,/b", (Path("/a"), Path("/b"))),
    ],
)
def test_texts_are_read_by_the_type_of_the_setting(name: str, text: str, expected: Any) -> None:
    by_environment = Settings.read(REPOSITORY | {f"XLASERVE_{name.upper()}": text})
    flag = text.split(",") if isinstance(expected, tuple) else text
    by_flag = Settings.read(REPOSITORY, **{name: flag})

    assert [expected, expected] == [getattr(by_environment, name), getattr(by_flag, name)]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"XLASERVE_MAX_CONNECTIONS": "many"}, "XLASERVE_MAX_CONNECTIONS: expected int"),
        ({"XLASERVE_DEVICE": "gpu"}, r"expected auto\|cpu\|cuda\|tpu, got 'gpu'"),
        (
            {"XLASERVE_MAX_PARKED_BYTES": "1"},
            "XLASERVE_MAX_PARKED_BYTES: expected max_held_bytes, which replaced it",
        ),
        ({"XLASERVE_TYPO": "1"}, "XLASERVE_TYPO: expected the name of a setting"),
        ({"XLASERVE_MAX_MODELS": "0"}, "max_models: expected at least 1"),
        ({"XLASERVE_LOG_LEVEL": "loud"}, "log_level"),
        ({"XLASERVE_LOAD_MODEL": "m"}, "load_model: expected model_control_mode explicit"),
        (
            {"XLASERVE_PROCESS_ROLES": "front-ends"},
            "process_roles: expected auto or workers with one process",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(variables: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSettings, match=text):
        Settings.read(REPOSITORY | variables)


def test_what_kubernetes_says_of_a_service_is_no_setting() -> None:
    """A Service named xlaserve gives every pod of its namespace such variables."""
    variables = {
        "XLASERVE_SERVICE_HOST": "10.0.0.7",
        "XLASERVE_SERVICE_PORT_GRPC": "8001",
        "XLASERVE_PORT": "tcp://10.0.0.7:8001",
        "XLASERVE_PORT_8001_TCP_ADDR": "10.0.0.7",
        "XLASERVE_CANARY_SERVICE_PORT": "8001",
    }

    assert Settings.read(REPOSITORY) == Settings.read(REPOSITORY | variables)


def test_the_memory_of_the_container_comes_from_either_variable() -> None:
    """ModelMesh, Model sizing: the first that is set counts."""
    both = {"MODEL_SERVER_MEM_REQ_BYTES": "2000", "CONTAINER_MEM_REQ_BYTES": "1000"}
    one = {"CONTAINER_MEM_REQ_BYTES": "1000"}

    assert [2000, 1000, 0] == [
        Settings.read(REPOSITORY | more).container_memory_bytes for more in (both, one, {})
    ]


def test_a_repository_is_needed() -> None:
    with pytest.raises(InvalidSettings, match="repository: expected a directory"):
        Settings.read({})


def test_every_setting_is_documented() -> None:
    """The help and docs/settings.md are generated from the strings below the fields."""
    described = describe_settings()

    assert {field.name for field in fields(Settings)} == {row.name for row in described}
    assert all(row.text.endswith(".") for row in described)


def test_every_setting_but_the_repository_is_in_a_group() -> None:
    """Each group is contiguous, whatever the order in the source."""
    groups = [row.group for row in describe_settings()]
    runs = [group for group, _ in itertools.groupby(groups)]

    assert ["repository"] == [row.name for row in describe_settings() if not row.group]
    assert len(runs) == len(set(runs)) > 10


def test_spans_are_written_to_no_file() -> None:
    with pytest.raises(InvalidSettings, match="trace_file"):
        Settings.read({}, repository="/r", trace_file="/t", trace_mode="opentelemetry")


@pytest.mark.parametrize(
    ("given", "mode"),
    [({}, 0o660), ({"modelmesh": True}, 0o666), ({"modelmesh": True, "unix_socket_mode": 0}, 0)],
)
def test_sockets_are_for_the_group_but_for_the_sidecar_of_a_mesh(
    given: dict[str, Any], mode: int
) -> None:
    assert mode == Settings(repository=Path(), **given).socket_mode


@pytest.mark.parametrize(("name", "successor"), REPLACED.items())
def test_a_renamed_setting_names_its_successor_wherever_it_is_said(
    name: str, successor: str, tmp_path: Path
) -> None:
    """The same table serves the environment, files, and flags."""
    assert successor in {row.name for row in describe_settings()}
    (tmp_path / "settings.toml").write_text(f'{name} = "1"\n')
    took_place = f"expected {successor}, which replaced it"
    with pytest.raises(InvalidSettings, match=f"XLASERVE_{name.upper()}: {took_place}"):
        Settings.read(REPOSITORY | {f"XLASERVE_{name.upper()}": "1"})
    with pytest.raises(InvalidSettings, match=f"'{name}' in .*: {took_place}"):
        read_file(tmp_path / "settings.toml")
    flag, now = (f"--{one.replace('_', '-')}" for one in (name, successor))
    for arguments in ([flag, "1"], [f"{flag}=1"]):
        result = CliRunner().invoke(application(), ["serve", str(tmp_path), *arguments])
        assert 2 == result.exit_code
        said = " ".join(result.output.replace("\u2502", " ").split())
        assert f"{flag}: expected {now}, which replaced it" in said
