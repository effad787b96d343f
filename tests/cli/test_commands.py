"""The command line, as a user runs it."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.process import ONLY_IDENTITY, ServerProcess, command, run, served
from typer.testing import CliRunner

from xlaserve import build
from xlaserve.cli import application
from xlaserve.cli.commands import COMMANDS, loaded
from xlaserve.settings.description import describe_settings

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

on_one_server = pytest.mark.asyncio(loop_scope="module")


async def test_serve_says_where_it_listens_and_ends_on_a_signal(example_models: Path) -> None:
    """In a pipe the log is JSON lines; SIGTERM is a clean end."""
    async with served(example_models) as server:
        started = server.event("started")

        assert (4, 4) == (started["ready"], started["models"])
        assert {"digits", "identity", "mlp", "simple"} == {
            record["model"] for record in server.log if record["event"] == "model loaded"
        }
        assert 0 == await server.stop(signal.SIGTERM)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(example_models: Path) -> AsyncIterator[ServerProcess]:
    async with served(example_models) as running:
        yield running


@on_one_server
async def test_infer_recognises_a_digit(server: ServerProcess) -> None:
    image = str(EXAMPLES / "data/seven.png")
    status, out, err = await run(
        *command("infer", "digits", "--image", image, "--classes", "3", "--url", server.url)
    )

    assert (0, "") == (status, err)
    assert "7" == next(line.split()[1] for line in out.splitlines() if line.startswith("│"))


@on_one_server
@pytest.mark.parametrize(
    ("image", "text"),
    [
        (EXAMPLES / "data/none.png", "none.png' cannot be read: No such file or directory"),
        (
            EXAMPLES / "digits.py",
            "INVALID_ARGUMENT: model 'digits', input 'image': expected a JPEG",
        ),
    ],
)
async def test_infer_says_what_is_wrong_with_an_image(
    server: ServerProcess, image: Path, text: str
) -> None:
    arguments = ("infer", "digits", "--image", str(image), "--url", server.url)
    status, out, err = await run(*command(*arguments))

    assert (1, "") == (status, out)
    assert text in err


@on_one_server
async def test_infer_takes_values(server: ServerProcess) -> None:
    values = [f"--input=INPUT{i}=[[{','.join([str(i + 1)] * 16)}]]" for i in range(2)]
    status, out, err = await run(*command("infer", "simple", *values, "--url", server.url))

    assert (0, "") == (status, err)
    assert "3 3 3" in out
    assert "-1 -1 -1" in out


@on_one_server
async def test_health_over_http(server: ServerProcess) -> None:
    """V2 protocol, Health: status codes, with small JSON bodies that every client can read."""
    async with aiohttp.ClientSession() as session:
        answers = []
        for path in ("live", "ready"):
            async with session.get(f"http://{server.http}/v2/health/{path}") as response:
                answers.append((response.status, await response.json()))

    assert [(200, {"live": True}), (200, {"ready": True})] == answers


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("serve", "/nowhere"), "setting repository: expected a directory, got '/nowhere'"),
        pytest.param(
            *(("serve", ".", "--grpc-endpoint", "8001"), "grpc_endpoint: expected port:"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(("serve", ".", "--device", "gpu"), "device: expected auto|cpu|cuda|tpu, got 'gpu'"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                ("serve", ".", "--device", "tpu", "--grpc-endpoint", "port:0"),
                "device 'tpu' is not",
            ),
            marks=pytest.mark.slow,
        ),
        (("infer", "m", "--url", "127.0.0.1:1"), "127.0.0.1:1: cannot connect"),
        pytest.param(
            *(("infer", "m", "--url", "nonsense"), "expected host:port or unix:path"),
            marks=pytest.mark.slow,
        ),
        (("export", "nowhere.py:model", "x"), "nowhere.py"),
    ],
)
async def test_a_mistake_is_one_line_and_an_exit_status(
    arguments: tuple[str, ...], text: str
) -> None:
    status, _, err = await run(*command(*arguments))
    last = err.strip().splitlines()[-1]

    assert 1 == status
    assert last.startswith("error: ")
    assert text in last
    assert "Traceback" not in err


@pytest.mark.slow
async def test_export_writes_a_model_that_is_served(tmp_path: Path) -> None:
    target = f"{EXAMPLES / 'plain_jax.py'}:model"
    status, out, err = await run(*command("export", target, str(tmp_path / "made")))

    assert (0, "") == (status, err)
    assert str(tmp_path / "made/1") in out
    assert "rows are proved" == out.strip().splitlines()[-1]

    async with served(tmp_path) as server:
        assert 1 == server.event("started")["ready"]


MIXING = """
import xlaserve

def centred(params, x):
    mean = x.mean(axis=0, keepdims=True)
    return {"y": x - mean}

model = xlaserve.Exportable(centred, None, {"x": ("FP32", [-1, 4])})
"""


@pytest.mark.slow
async def test_export_says_which_line_mixes_rows(tmp_path: Path) -> None:
    source = tmp_path / "mixing.py"
    source.write_text(MIXING)
    status, out, err = await run(*command("export", f"{source}:model", str(tmp_path / "made")))

    assert (0, "") == (status, err)
    assert re.match(
        "rows are mixed: stablehlo.reduce reduces over the rows: output 'y' of a row changes by"
        r" up to \S+ in a batch of 3, beside one another: the row \[.+\] gives \[.+\] alone and"
        r" \[.+\] there \(mixing.py:5\), in output 'y'; requests will not be batched;"
        " max_batch_size is 0 instead of 64",
        out.strip().splitlines()[-1],
    )


@pytest.mark.slow
async def test_a_unix_socket_serves_and_goes(example_models: Path, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    flags = ("--grpc-endpoint", f"unix:{path}", *ONLY_IDENTITY)
    async with served(example_models, *flags) as server:
        status, _, err = await run(
            *command(
                "infer", "identity", f"--input=x=[[{','.join(['1'] * 16)}]]", "--url", server.url
            )
        )
        await server.stop()

    assert (0, "") == (status, err)
    assert not path.exists()


async def test_help_names_every_setting_and_its_variable() -> None:
    """By group, and without truncation on a terminal of 80 columns."""
    status, out, _ = await run(*command("serve", "--help"))
    lines = out.splitlines()
    described = describe_settings()

    assert 0 == status
    assert 80 >= max(map(len, lines))
    assert [] == [row.name for row in described if f"[env: {row.variable}]" not in out]
    assert [row.group for row in described if row.name == "tls_key"] == ["TLS"]

    headings = [lines.index(f"{group}:") for group in dict.fromkeys(r.group for r in described[1:])]

    assert sorted(headings) == headings
    endpoints = headings.index(lines.index("Endpoints:"))
    assert headings[endpoints] < lines.index("  --host VALUE") < headings[endpoints + 1]


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "serve", "infer", "bench", "export", "adopt", "import", "health"),
        *("repo", "repo migrate", "models", "models list", "models load", "models watch"),
        *("config", "config show", "init", "doctor", "completion", "top"),
    ],
)
def test_no_help_is_cut_on_80_columns(arguments: str) -> None:
    result = CliRunner().invoke(
        application(), [*arguments.split(), "--help"], env={"COLUMNS": "80"}
    )

    assert 0 == result.exit_code
    assert "…" not in result.output
    assert 80 >= max(map(len, result.output.splitlines()))


@pytest.mark.parametrize("flag", ["--version", "--model-version"])
def test_the_version_of_a_model_has_two_flags(flag: str) -> None:
    commands = {name: loaded(name) for name in ("infer", "bench")}
    commands |= {f"models {name}": each for name, each in loaded("models").commands.items()}
    flags = {name: {f for one in each.params for f in one.opts} for name, each in commands.items()}
    versioned = {name for name in commands if "--version" in flags[name]}

    asking = {"infer", "bench", "models show", "models config", "models stats", "models load"}
    assert asking == versioned
    for name in versioned:
        with commands[name].make_context(name, [flag, "3"], resilient_parsing=True) as context:
            assert "3" in {str(value) for value in context.params.values()}, name


def test_brackets_in_help_are_shown() -> None:
    """Help texts are plain: rich reads no markup in them."""

    def _walk(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], str]]:
        yield path, command.help or ""
        yield from ((path, getattr(one, "help", None) or "") for one in command.params)
        for name, each in getattr(command, "commands", {}).items():
            yield from _walk((*path, name), each)

    texts = [found for name in COMMANDS for found in _walk((name,), loaded(name))]
    bracketed = [(path, text.replace("\\[", "[")) for path, text in texts if "[" in text]
    lost = []
    for path, text in bracketed:
        shown = CliRunner().invoke(application(), [*path, "--help"], env={"COLUMNS": "300"}).output
        words = re.sub(r"[\s│]+", " ", shown)
        lost += [(path, one) for one in re.findall(r"\[+[^\]]*\]+", text) if one not in words]

    assert "token" in {path[0] for path, _ in bracketed}
    assert [] == lost


async def test_the_module_is_the_command() -> None:
    """`python -m xlaserve`, for when the script is not on the path."""
    assert (0, f"xlaserve {build.version()}\n", "") == await run(
        sys.executable, "-m", "xlaserve", "--version"
    )


@pytest.mark.slow
async def test_shells_complete_the_command() -> None:
    """With typer's --install-completion and --show-completion."""
    asked = {"_XLASERVE_COMPLETE": "complete_bash", "COMP_WORDS": "xlaserve serve --tls-k"}
    script = "import sys; sys.argv[0] = 'xlaserve'; from xlaserve.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | asked | {"COMP_CWORD": "2"},
    )
    out, _ = await process.communicate()

    assert b"--tls-key" == out.strip()
