"""Settings files: precedence and refusals."""

import json
from pathlib import Path

import pytest
from support.process import command, run
from typer.testing import CliRunner, Result

from xlaserve.cli import application
from xlaserve.cli.serve.settings_file import merged
from xlaserve.errors import InvalidSettings


def invoke(*arguments: str, **variables: str) -> Result:
    """Run `xlaserve config` with these environment variables."""
    environment = {"COLUMNS": "120", "NO_COLOR": "1", **variables}
    return CliRunner().invoke(application(), ["config", *arguments], env=environment)


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    path = tmp_path / "xlaserve.toml"
    path.write_text(
        'repository = "models"\nhttp_endpoint = "port:9000"\nmax_connections = 7\n'
        'load_model = ["a,b", "c"]\nexit_on_error = true\n'
        'model_control_mode = "explicit"\n'
    )
    return path


def test_flags_go_before_the_environment_before_the_file(file: Path) -> None:
    read = merged(file, {"host": "::1"}, {"XLASERVE_HTTP_ENDPOINT": "port:1", "XLASERVE_HOST": "x"})

    assert ("::1", "port:1", 7) == (read.host, read.http_endpoint, read.max_connections)
    assert (("a,b", "c"), True) == (read.load_model, read.exit_on_error)


def test_the_environment_may_empty_what_the_file_gives(file: Path) -> None:
    assert () == merged(file, {}, {"XLASERVE_LOAD_MODEL": ""}).load_model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http_endpiont = 1", "the name of a setting, such as 'http_endpoint', got 1"),
        ("http-endpoint = 1", "the name of a setting, such as 'http_endpoint', got 1"),
        ("[serve]\nhost = 1", "'serve' in "),
        ("host = [1]", "expected one value, got"),
        ("host = 2026-01-01", "expected a string, a number, a boolean, or a list of them"),
        ("load_model = [[1]]", "expected a string, a number, a boolean, or a list of them"),
        ("max_connections = true", "max_connections: expected int, got 'true'"),
        ("max_connections = 1.5", "max_connections: expected int, got '1.5'"),
        ("max_connections = -1", "max_connections"),
        ("host", "expected TOML"),
        ("host = '\xff'", "expected TOML"),
    ],
)
def test_a_file_that_cannot_be_obeyed_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidSettings) as caught:
        merged(path, {"repository": "."}, {})

    assert expected in str(caught.value)


def test_check_counts_what_it_read(file: Path) -> None:
    assert f"{file}: 6 settings\n" == invoke("check", str(file)).output
    assert isinstance(invoke("check", str(file.parent / "none")).exception, InvalidSettings)


def test_show_says_where_each_value_comes_from(file: Path) -> None:
    shown = json.loads(invoke("show", str(file), "--json", XLASERVE_HTTP_ENDPOINT="port:1").output)
    everything = json.loads(invoke("show", str(file), "--json", "--all").output)

    assert {"value": "port:1", "from": "XLASERVE_HTTP_ENDPOINT"} == shown["http_endpoint"]
    assert {"value": "7", "from": "file"} == shown["max_connections"]
    assert "host" not in shown
    assert {"value": "127.0.0.1", "from": "default"} == everything["host"]


async def test_serve_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "xlaserve.toml"
    file.write_text('repository = "/nowhere"\n')
    status, _, err = await run(*command("serve", "--config", str(file)))

    assert 1 == status
    assert "setting repository: expected a directory, got '/nowhere'" in err
