"""SageMaker's variables as settings."""

from pathlib import Path
from typing import Any

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode, Readiness

MULTI = {"SAGEMAKER_MULTI_MODEL": "true"}


def read(environment: dict[str, str] | None = None, **flags: Any) -> Settings:
    return Settings.read(environment or {}, **{"sagemaker": True} | flags)


def test_nothing_is_needed_to_serve_one_model() -> None:
    """Ready only with the model found at startup; gRPC has no port."""
    settings = read()

    assert ("0.0.0.0", "port:8080", "none") == (
        settings.host,
        settings.http_endpoint,
        settings.grpc_endpoint,
    )
    assert (Path("/opt/ml/model"), "model", ("*",)) == (
        settings.repository,
        settings.bare_model,
        settings.load_model,
    )
    assert (ModelControlMode.EXPLICIT, Readiness.MODELS) == (
        settings.model_control_mode,
        settings.readiness,
    )


def test_a_multi_model_container_loads_nothing_at_start() -> None:
    """An unload waits nearly as long as the platform's limit of 360 s."""
    settings = read(MULTI)

    assert (Path("/opt/ml/models"), "", (), 350, Readiness.STARTUP) == (
        settings.repository,
        settings.bare_model,
        settings.load_model,
        settings.drain_seconds,
        settings.readiness,
    )


def test_a_variable_of_ours_turns_it_on() -> None:
    assert read() == Settings.read({"XLASERVE_SAGEMAKER": "true"})


def test_without_it_the_variables_say_nothing() -> None:
    environment = {"SAGEMAKER_BIND_TO_PORT": "9000", "SAGEMAKER_MULTI_MODEL": "maybe"}

    assert Settings(repository=Path("/m")) == Settings.read(environment, repository="/m")


@pytest.mark.parametrize(
    ("variable", "text", "setting", "expected"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "9000", "http_endpoint", "port:9000"),
        ("SAGEMAKER_BIND_TO_PORT", "", "http_endpoint", "port:8080"),
        ("SAGEMAKER_MULTI_MODEL", "True", "sagemaker_multi_model", True),
        ("SAGEMAKER_MULTI_MODEL", "false", "sagemaker_multi_model", False),
        ("SAGEMAKER_MULTI_MODEL", "", "sagemaker_multi_model", False),
        ("SAGEMAKER_BASE_DIR", "/tmp/x", "repository", Path("/tmp/x/model")),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "6", "max_message_bytes", 6 << 20),
        ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "text/csv", "default_accept", "text/csv"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "10", "log_level", "debug"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "20", "log_level", "info"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "50", "log_level", "error"),
    ],
)
def test_each_variable_is_a_setting(
    variable: str, text: str, setting: str, expected: object
) -> None:
    assert expected == getattr(read({variable: text}), setting)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "http"),
        ("SAGEMAKER_BIND_TO_PORT", "0"),
        ("SAGEMAKER_BIND_TO_PORT", "65536"),
        ("SAGEMAKER_BIND_TO_PORT", "-1"),
        ("SAGEMAKER_BIND_TO_PORT", "٨"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "1111"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "2222-1111"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "0-10"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "1111-65536"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "1111-2222-3333"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "a-b"),
        ("SAGEMAKER_MULTI_MODEL", "maybe"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "0"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "6.5"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "15"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "info"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(InvalidSettings, match=f"setting {variable}: expected .*, got '{text}'"):
        read({variable: text})


@pytest.mark.parametrize(
    ("ports", "http", "expected"),
    [
        ("1111-2222", None, "port:1111"),
        ("8080-8090", None, "port:8081"),
        ("8079-8090", None, "port:8079"),
        ("8080-8080", None, "none"),
        ("8081-8090", "port:8081", "port:8082"),
        ("8081-8090", "port:8080", "port:8081"),
        ("8081-8090", "unix:/tmp/http.sock", "port:8081"),
    ],
)
def test_grpc_has_the_first_safe_port_that_http_has_not(
    ports: str, http: str | None, expected: str
) -> None:
    settings = read({"SAGEMAKER_SAFE_PORT_RANGE": ports}, http_endpoint=http)

    assert expected == settings.grpc_endpoint


@pytest.mark.parametrize("setting", ["grpc_endpoint", "grpc_data_endpoint", "http_endpoint"])
@pytest.mark.parametrize("port", ["1110", "2223", "0"])
def test_a_port_that_is_not_safe_is_refused(setting: str, port: str) -> None:
    """Both from the platform's variables and from our own."""
    environment = {"SAGEMAKER_SAFE_PORT_RANGE": "1111-2222"}
    variable = {f"XLASERVE_{setting.upper()}": f"port:{port}"}
    text = f"setting {setting}: expected a port of SAGEMAKER_SAFE_PORT_RANGE, 1111 to 2222"
    with pytest.raises(InvalidSettings, match=text):
        read(environment, **{setting: f"port:{port}"})
    with pytest.raises(InvalidSettings, match=text):
        read(environment | variable)


def test_a_port_in_the_range_is_taken() -> None:
    environment = {"SAGEMAKER_SAFE_PORT_RANGE": "1111-2222"}

    assert "port:2222" == read(environment, grpc_endpoint="port:2222").grpc_endpoint


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        ("host", "::1"),
        ("http_endpoint", "port:9"),
        ("grpc_endpoint", "unix:/tmp/grpc.sock"),
        ("repository", Path("/m")),
        ("readiness", Readiness.STARTUP),
        ("model_control_mode", ModelControlMode.NONE),
        ("load_model", ("m",)),
        ("max_message_bytes", 2048),
        ("default_accept", "text/csv"),
        ("log_level", "warning"),
        ("sagemaker_multi_model", True),
    ],
)
def test_flags_and_our_variables_come_first(setting: str, given: Any) -> None:
    environment = {
        "SAGEMAKER_BIND_TO_PORT": "9000",
        "SAGEMAKER_MAX_PAYLOAD_IN_MB": "6",
        "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "application/json",
        "SAGEMAKER_CONTAINER_LOG_LEVEL": "10",
        "SAGEMAKER_MULTI_MODEL": "false",
    }
    text = ",".join(given) if isinstance(given, tuple) else str(given)
    variable = {f"XLASERVE_{setting.upper()}": text}

    assert given == getattr(read(environment, **{setting: given}), setting)
    assert given == getattr(read(environment | variable), setting)


def test_a_name_for_the_only_model() -> None:
    assert "digits" == read(default_model="digits").bare_model


def test_a_mesh_and_sagemaker_do_not_both_decide() -> None:
    with pytest.raises(InvalidSettings, match="sagemaker: expected false with modelmesh"):
        read(modelmesh=True)
