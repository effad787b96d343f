"""Each build reports its identity: on the command line, to clients, in logs and manifests."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from support import tiny_language
from support.process import ONLY_IDENTITY, command, run, served

from xlaserve import build, export_model
from xlaserve.artifact import generator_record as record
from xlaserve.artifact import manifest
from xlaserve.artifact.written_by import Writer
from xlaserve.errors import InvalidModel

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = COMMIT[::-1]
BUILD = r"0\.1\.0(\+[0-9a-f]{12})?"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".git").mkdir()
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_commit_of_a_branch(source: Path) -> None:
    _write(source / ".git/HEAD", "ref: refs/heads/main\n")
    _write(source / ".git/refs/heads/main", f"{COMMIT}\n")

    assert COMMIT == build.commit_of(source)


def test_commit_of_a_packed_branch(source: Path) -> None:
    _write(source / ".git/HEAD", "ref: refs/heads/main\n")
    packed = f"# pack-refs with: peeled\n{OTHER} refs/heads/mainly\n{COMMIT} refs/heads/main\n"
    _write(source / ".git/packed-refs", packed)

    assert COMMIT == build.commit_of(source)


def test_commit_of_no_branch(source: Path) -> None:
    _write(source / ".git/HEAD", f"{COMMIT}\n")

    assert COMMIT == build.commit_of(source)


def test_commit_of_a_worktree(source: Path) -> None:
    tree = source / "tree"
    _write(tree / "pyproject.toml", "")
    _write(tree / ".git", f"gitdir: {source / '.git/worktrees/tree'}\n")
    _write(source / ".git/worktrees/tree/HEAD", "ref: refs/heads/side\n")
    _write(source / ".git/worktrees/tree/commondir", "../..\n")
    _write(source / ".git/refs/heads/side", f"{COMMIT}\n")

    assert COMMIT == build.commit_of(tree)


def test_a_build_without_a_repository_may_be_told(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.VARIABLE, COMMIT)
    told = build.commit_of(source)
    _write(source / ".git/HEAD", "anything")
    monkeypatch.setenv(build.VARIABLE, "main; rm")

    assert COMMIT == told
    assert "" == build.commit_of(source)
    assert "" == build.commit_of(source / "elsewhere")


@pytest.mark.parametrize(
    ("distributions", "expected"),
    [
        (["1.2.3"], "1.2.3"),
        (["1.2.3+local.1"], "1.2.3+local.1"),
        # An interrupted update leaves this: the code may belong to either version.
        (["1.2.3", "1.3.0"], "7.0"),
        ([], "7.0"),
    ],
)
def test_the_number_is_that_of_the_distribution_or_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributions: list[str], expected: str
) -> None:
    monkeypatch.setattr(build, "__file__", str(tmp_path / "packages/xlaserve/build.py"))
    for each in distributions:
        (tmp_path / f"packages/xlaserve-{each}.dist-info").mkdir(parents=True)
    (tmp_path / "packages/xlaserve_other-5.0.dist-info").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('version = "7.0"\n')

    assert expected == build.number.__wrapped__()

    (tmp_path / "pyproject.toml").unlink()
    if len(distributions) != 1:
        assert build.UNKNOWN == build.number.__wrapped__()


async def test_clients_log_and_manifests_are_told(tmp_path: Path, example_models: Path) -> None:
    said = await run(*command("--version"))
    async with served(example_models, *ONLY_IDENTITY) as server:
        async with aiohttp.ClientSession(f"http://{server.http}") as session:
            async with session.get("/v2") as answer:
                metadata = await answer.json()
        logged = server.event("listening")["version"]
    export_model(lambda p, x: {"y": x}, None, {"x": ("FP32", [1])}, tmp_path / "m/1")
    tiny_language.export(tmp_path / "g/1")

    version = build.version()
    assert re.fullmatch(BUILD, version)
    assert (0, f"xlaserve {version}\n", "") == said
    assert (version, version) == (metadata["version"], logged)
    assert version == manifest.read(tmp_path / "m/1").written_by
    assert version == Writer.of(record.read(tmp_path / "g/1").jax_version).xlaserve


@pytest.mark.parametrize(
    ("wrote", "expected"),
    [
        ("0.14.0, xlaserve 0.3.0+abc", "serve it with xlaserve 0.3.0+abc (which wrote it) or "),
        ("0.14.0", "serve it with a newer xlaserve, or export the model again with this one"),
    ],
)
@pytest.mark.parametrize(("name", "read"), [("model.json", manifest), ("generator.json", record)])
def test_a_newer_format_names_who_can_read_it(
    tmp_path: Path, name: str, read: object, wrote: str, expected: str
) -> None:
    kind = "generator" if read is record else "jax_export"
    said = {"format_version": 99, "kind": kind, "jax_version": wrote, "unknown": 1}
    (tmp_path / name).write_text(json.dumps(said))

    with pytest.raises(InvalidModel) as caught:
        read.read(tmp_path)  # type: ignore[attr-defined]

    assert "format version 99, this server reads " in str(caught.value)
    assert f"(xlaserve {build.version()}): {expected}" in str(caught.value)


def test_a_manifest_of_before_names_no_build(tmp_path: Path) -> None:
    directory = ROOT / "tests/data/old_models/0.10.2/mlp/1"

    found = manifest.read(directory)
    assert ("0.10.2", "") == (found.jax_version, found.written_by)
    assert Writer("0.10.2") == Writer.of("0.10.2")
    assert "0.10.2" == Writer.of("0.10.2").text


class _Hook:
    """A stand-in for hatchling's class, which the hook does not need."""

    def __init__(self, root: Path, target: str) -> None:
        self.root, self.target_name = str(root), target


@pytest.mark.parametrize(
    ("target", "place"),
    [("wheel", "xlaserve/commit.txt"), ("sdist", "server/xlaserve/commit.txt")],
)
def test_what_is_built_has_the_commit(
    source: Path, monkeypatch: pytest.MonkeyPatch, target: str, place: str
) -> None:
    _write(source / ".git/HEAD", f"{COMMIT}\n")
    (source / "server").symlink_to(ROOT / "server")
    interface = SimpleNamespace(BuildHookInterface=_Hook)
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["CommitHook"](source, target)
    added: dict[str, dict[str, str]] = {"force_include": {}}
    editable: dict[str, dict[str, str]] = {"force_include": {}}

    hook.initialize("standard", added)
    ((path, found),) = added["force_include"].items()
    written = Path(path).read_text()
    hook.initialize("editable", editable)
    hook.finalize("standard", added, "")

    assert (f"{COMMIT}\n", place) == (written, found)
    assert not Path(path).exists()
    assert {"force_include": {}} == editable
