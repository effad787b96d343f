"""Model files are opened by one module, which follows no link out of the roots at any time."""

import ast
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from support.privileges import unprivileged

import xlaserve
from xlaserve.artifact import artifact, manifest, weights
from xlaserve.artifact.manifest import ARTIFACT, STABLEHLO, WEIGHTS, Manifest
from xlaserve.errors import InvalidModel
from xlaserve.files import roots
from xlaserve.files.roots import Roots, lies_in
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.devices.placement import ONE_CPU
from xlaserve.runtime.load_context import LoadContext

OUTSIDE = "is outside the model repository and every model_root"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    (tmp_path / "outside").write_text("hunter2")
    return path


def read(root: Path, name: str) -> bytes:
    with Roots.of((root,)).open(root / name) as file:
        return file.read()


@pytest.mark.parametrize("directory", ["/", "/a", "/a/b", "/a/b/c"])
@pytest.mark.parametrize("path", ["/", "/a", "/ab", "/a/b", "/a/bc", "/a/b/c/d", "/b/a/b"])
def test_a_path_lies_in_a_directory_as_pathlib_says(path: str, directory: str) -> None:
    """A path that merely begins with the directory's name is not inside it."""
    wanted = Path(path).is_relative_to(directory)

    assert wanted is lies_in(Path(path), Path(directory))


def test_a_link_inside_is_followed(root: Path) -> None:
    """Volumes mounted by Kubernetes contain links into a hidden directory next to them."""
    (root / "..data").mkdir()
    (root / "..data/file").write_text("x")
    (root / "link").symlink_to("..data/file")
    (root / "directory").symlink_to("..data")

    assert [b"x", b"x"] == [read(root, "link"), read(root, "directory/file")]


def test_a_link_from_one_root_into_another_is_followed(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "other/file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("x")
    both = Roots.of((root, tmp_path / "other"))
    with both.open(root / "link") as file:
        assert b"x" == file.read()


def test_a_root_may_be_reached_by_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    (root / "file").write_text("x")

    assert b"x" == read(tmp_path / "link", "file")


@pytest.mark.parametrize(
    "target", ["../outside", "../gone", "link", "/etc/passwd", "x/../../outside"]
)
def test_what_leads_out_is_refused_whatever_is_there(root: Path, target: str) -> None:
    (root / "link").symlink_to(target)
    with pytest.raises(InvalidModel) as caught:
        read(root, "link")

    assert OUTSIDE in str(caught.value)
    assert "'link' is" in str(caught.value)


def test_a_sibling_whose_name_begins_alike_is_outside(root: Path, tmp_path: Path) -> None:
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2/file").write_text("x")
    with pytest.raises(InvalidModel, match=OUTSIDE):
        read(root, "../root2/file")


def test_what_is_no_file_is_refused_and_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "directory").mkdir()
    for name in ("fifo", "directory"):
        with pytest.raises(InvalidModel, match=f"{name} is not a regular file"):
            read(root, name)
    with pytest.raises(InvalidModel, match="zero is not a regular file"):
        roots.ANYWHERE.open(Path("/dev/zero"))


def test_what_is_missing_or_below_a_file_is_an_error_of_the_system(root: Path) -> None:
    (root / "file").write_text("x")
    with pytest.raises(FileNotFoundError):
        read(root, "gone")
    with pytest.raises(NotADirectoryError):
        read(root, "file/below")


def test_a_root_that_is_a_file_is_opened(root: Path) -> None:
    (root / "file").write_text("x")
    with Roots.of((root / "file",)).open(root / "file") as file:
        assert b"x" == file.read()


def test_a_directory_that_may_be_gone_through_need_not_be_listed() -> None:
    with unprivileged() as root:
        (root / "hidden").mkdir()
        (root / "hidden/file").write_text("x")
        (root / "hidden").chmod(0o100)

        with pytest.raises(PermissionError):
            list((root / "hidden").iterdir())
        assert b"x" == read(root, "hidden/file")


def test_nothing_stays_open_when_something_is_refused(root: Path) -> None:
    (root / "directory").mkdir()
    os.mkfifo(root / "directory/fifo")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("directory/fifo", "directory/gone", "directory", "gone/gone"):
        with pytest.raises((InvalidModel, OSError)):
            read(root, name)

    assert before == len(list(Path("/proc/self/fd").iterdir()))


# --- races -------------------------------------------------------------------------------------


def swap(path: Path, target: Path) -> None:
    """Replace a file or a directory by a link."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(target)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function once, between the check of the next path and its opening."""
    check = Roots.confine
    waiting: list[Callable[[], None]] = []

    def confine(self: Roots, path: Path, said: str = "") -> Path:
        resolved = check(self, path, said)
        while waiting:
            waiting.pop()()
        return resolved

    monkeypatch.setattr(Roots, "confine", confine)
    yield waiting.append
    assert [] == waiting


@pytest.mark.parametrize("swapped", ["a/b/file", "a/b", "a"])
def test_a_link_that_is_put_there_behind_the_check_is_not_followed(
    root: Path, tmp_path: Path, between: Callable[[Callable[[], None]], None], swapped: str
) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_text("x")
    # Without a link in the path, nothing is checked in advance.
    (root / "by").symlink_to("a")
    other = tmp_path / "other"
    (other / "b").mkdir(parents=True)
    for path in (other / "b/file", other / "file"):
        path.write_text("hunter2")
    target = {"a/b/file": other / "file", "a/b": other / "b", "a": other}[swapped]
    between(lambda: swap(root / swapped, target))
    with pytest.raises(InvalidModel, match=OUTSIDE):
        read(root, "by/b/file")


@pytest.mark.parametrize("swapped", ["a/b/file", "a/b", "a", ""])
def test_a_link_that_is_put_there_on_the_way_down_is_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """A path without links is not resolved first."""
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_text("x")
    other = tmp_path / "other"
    shutil.copytree(root, other)
    (other / "a/b/file").write_text("hunter2")
    confining = Roots.of((root,))
    descend = roots._descend

    def swapping(*arguments: object) -> int:
        monkeypatch.setattr(roots, "_descend", descend)
        swap(root / swapped, other / swapped)
        return descend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(roots, "_descend", swapping)
    with pytest.raises(InvalidModel, match=OUTSIDE):
        confining.open(root / "a/b/file").close()


def test_a_path_without_links_is_not_resolved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving takes a fifth of the load time of a small model."""
    (root / "file").write_text("x")
    confining = Roots.of((root,))
    monkeypatch.setattr(roots, "_resolved", None)

    with confining.open(root / "file") as file:
        assert b"x" == file.read()


@pytest.mark.parametrize("path", ["../out", "a/../../out", "a/../b"])
def test_a_path_that_goes_up_is_resolved(root: Path, path: str) -> None:
    """After a link, `..` leads elsewhere than the text of the path suggests."""
    (root / "a").mkdir()
    (root.parent / "out").write_text("hunter2")
    (root / "b").write_text("x")
    confining = Roots.of((root,))

    if path.endswith("out"):
        with pytest.raises(InvalidModel, match=OUTSIDE):
            confining.open(root / path).close()
    else:
        with confining.open(root / path) as file:
            assert b"x" == file.read()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model of two kinds, and a copy of everything outside the roots."""
    base = tmp_path_factory.mktemp("confined")
    params, inputs = {"w": np.ones((1, 300), np.float32)}, {"x": ("FP32", [-1, 300])}
    xlaserve.export_model(lambda p, x: {"y": x + p["w"]}, params, inputs, base / "in/m/1")
    shutil.copy(base / "in/m/1" / ARTIFACT, base / "in/single.jaxexp")
    shutil.copytree(base / "in", base / "out")
    return base


@pytest.mark.parametrize("name", [manifest.FILE_NAME, STABLEHLO, WEIGHTS, ARTIFACT])
@pytest.mark.parametrize("mapped", [False, True])
def test_no_loader_opens_a_file_that_leads_out(
    model: Path, tmp_path: Path, name: str, mapped: bool
) -> None:
    """The file has the correct contents, but is outside of the roots."""
    shutil.copytree(model / "in", tmp_path / "in")
    directory = tmp_path / "in/m/1"
    swap(directory / name, model / "out/m/1" / name)
    inside = Roots.of((tmp_path / "in",))
    context = LoadContext("m", "1", ModelConfig(), mmap_parameters=mapped, roots=inside)
    with pytest.raises(InvalidModel, match=OUTSIDE):
        loaders.load(directory, context).close()
    with pytest.raises(InvalidModel, match=OUTSIDE):
        loaders.predict_size(directory, ModelConfig(), ONE_CPU, inside)


Reader: TypeAlias = Callable[[Path, Manifest, Roots], object]

READERS: dict[str, tuple[str, Reader]] = {
    "manifest": (manifest.FILE_NAME, lambda path, told, inside: manifest.read(path, inside)),
    "computation": (STABLEHLO, artifact.read),
    "artifact": (ARTIFACT, artifact.read),
    "entries": (WEIGHTS, lambda path, told, inside: weights.read_entries(path, WEIGHTS, inside)),
    "weights": (WEIGHTS, lambda path, told, inside: [*weights.read(path, WEIGHTS, None, inside)]),
    "mapped": (
        WEIGHTS,
        lambda path, told, inside: [*weights.read_mapped(path, WEIGHTS, None, inside)],
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_opens_a_file_that_leads_out(model: Path, tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    shutil.copytree(model / "in", tmp_path / "in")
    directory = tmp_path / "in/m/1"
    swap(directory / name, model / "out/m/1" / name)
    with pytest.raises(InvalidModel, match=OUTSIDE):
        read(directory, manifest.read(model / "in/m/1"), Roots.of((tmp_path / "in",)))


def test_no_loader_opens_a_single_file_that_leads_out(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link.jaxexp").symlink_to(model / "out/single.jaxexp")
    inside = Roots.of((tmp_path,))
    context = LoadContext("m", "1", ModelConfig(), roots=inside)
    for ask in (
        lambda path: loaders.load(path, context),
        lambda path: loaders.predict_size(path, ModelConfig(), ONE_CPU, inside),
    ):
        with pytest.raises(InvalidModel, match=OUTSIDE):
            ask(tmp_path / "link.jaxexp")


@pytest.mark.parametrize("name", ["config.json", "config.pbtxt"])
def test_no_configuration_is_read_that_leads_out(root: Path, name: str) -> None:
    (root / name).symlink_to("../outside")
    with pytest.raises(InvalidModel) as caught:
        read_config(root, roots=Roots.of((root,)))

    assert OUTSIDE in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- modules that open files ---------------------------------------------------------------------

OPENERS = {
    # Reads model files.
    "files/roots.py",
    # Write model files, or read other files.
    "files/files.py",
    "authoring/export.py",
    "generation/exporting.py",
    "importers/huggingface/checkpoint.py",
    "runtime/programs/compilation_cache.py",
    "offline/cache_contents.py",
    "artifact/replaced.py",
    "runtime/programs/mappings.py",
    "importers/onnx/importing.py",
    "importers/onnx/configuring.py",
    "python_models/process/running.py",
    "runtime/programs/compilers/child.py",
    "runtime/programs/compilers/process.py",
    "offline/targets/child.py",
    "offline/targets/results.py",
    # Keeps copies of remote files, which are then opened through `roots.py`.
    "storage/cache.py",
    "storage/fetching.py",
    "storage/skeleton.py",
    "storage/units.py",
    "residence/repository/overrides.py",
    # Locks its own temporary directories.
    "files/temporary.py",
    # Detects changed files; only a hash of their contents is used.
    "residence/repository/fingerprints.py",
    "residence/handover.py",
    "residence/host.py",
    "serving/inputs/shared_memory.py",
    "serving/observability/trace_file.py",
    "serving/observability/access_file.py",
    # Reads files that only the operator can name.
    "serving/access/key_set.py",
    "serving/access/rules_file.py",
}
"""The modules that may open files themselves; new code uses `roots.py`."""

METHODS = {"open", "fdopen", "read_bytes", "read_text", "fromfile", "memmap"}
NOT_FILES = {"ledger", "tokens", "roots", "self._roots", "driver", "FsspecStore"}
"""Other objects with a method of such a name."""


def opens_a_file(path: Path) -> bool:
    """Tell whether a module calls anything that opens a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            owner, _, method = ast.unparse(node.func).rpartition(".")
            if method in METHODS and owner not in NOT_FILES:
                return True
    return False


LAYERS = (
    *("files", "row_proofs", "model_config", "artifact", "storage", "runtime", "authoring"),
    *("generation", "python_models", "importers", "concurrency", "serving", "residence", "offline"),
)


def test_nothing_else_of_models_opens_a_file() -> None:
    package = Path(xlaserve.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for layer in LAYERS
        for path in (package / layer).rglob("*.py")
        if opens_a_file(path)
    }

    assert "files/roots.py" in found
    assert found <= OPENERS, found - OPENERS
