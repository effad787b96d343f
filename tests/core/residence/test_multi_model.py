"""SageMaker multi-model containers: models loaded by URL under opaque names."""

import asyncio
import gc
import json
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from support.core import AddModel, Core, MakeCore, World

from xlaserve.errors import (
    InvalidName,
    LoadFailed,
    ModelAlreadyLoaded,
    ModelControlForbidden,
    ModelNotFound,
    OutOfMemory,
)
from xlaserve.residence.platforms.multi_model import (
    MAX_PAGE,
    HostedModel,
    MultiModelContainer,
    NoDefaultModel,
)
from xlaserve.residence.repository.repository import Repository
from xlaserve.settings.choices import ModelControlMode

Unpack = Callable[..., str]
"""Writes a version directory below the archive directory, and returns its URL."""


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """The directory that the platform unpacks models into."""
    directory = tmp_path / "opt/ml/models"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def unpack(archives: Path) -> Unpack:
    def write(path: str, amount: float = 1, *, inner: str = "") -> str:
        directory = archives / path / inner
        directory.mkdir(parents=True)
        (directory / "amount.json").write_text(json.dumps(amount))
        return str(archives / path)

    return write


@pytest.fixture
def served(make_core: MakeCore, archives: Path) -> Core:
    return make_core(model_root=(archives,))


@pytest.fixture
def container(served: Core) -> MultiModelContainer:
    return contain(served)


def contain(core: Core, default_model: str = "") -> MultiModelContainer:
    return MultiModelContainer(
        core.control, core.registry, core.repository, default_model=default_model
    )


def names(container: MultiModelContainer) -> list[str]:
    return [model.name for model in container.page().models]


# --- load --------------------------------------------------------------------------------------


async def test_a_model_answers_to_the_name_that_it_is_given(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model")
    await container.load("opaque", url)

    assert HostedModel("opaque", url) == container.get("opaque")


@pytest.mark.parametrize("name", ["a/b c", "..", "ключ", "", "x" * 1025, "\udc80", "x" * 1024])
async def test_a_name_may_be_any_text_that_can_be_sent_back(
    container: MultiModelContainer, unpack: Unpack, name: str
) -> None:
    url = unpack("a/model")
    if name in ("", "x" * 1025, "\udc80"):
        with pytest.raises(InvalidName):
            await container.load(name, url)
        return
    await container.load(name, url)

    assert [name] == names(container)


async def test_a_loaded_name_is_taken(container: MultiModelContainer, unpack: Unpack) -> None:
    await container.load("m", unpack("a/model"))
    with pytest.raises(ModelAlreadyLoaded, match="model 'm' is loaded already"):
        await container.load("m", unpack("b/model"))


async def test_one_of_two_loads_of_a_name_at_once_is_told_so(
    container: MultiModelContainer, unpack: Unpack, world: World
) -> None:
    url = unpack("a/model")
    world.may_load.clear()
    first, second = (asyncio.ensure_future(container.load("m", url)) for _ in range(2))
    with pytest.raises(ModelAlreadyLoaded):
        await second
    await asyncio.to_thread(world.loading.wait, 10)
    with pytest.raises(ModelAlreadyLoaded):
        await container.load("m", url)
    world.may_load.set()
    await first

    assert ["m/1"] == world.loads


async def test_two_names_of_one_url_are_two_models(
    container: MultiModelContainer, unpack: Unpack, world: World
) -> None:
    url = unpack("a/model")
    await container.load("m", url)
    await container.load("n", url)

    assert (["m", "n"], 2) == (names(container), len(world.open))


async def test_a_failed_load_leaves_nothing_behind(
    container: MultiModelContainer, served: Core, unpack: Unpack
) -> None:
    url = unpack("a/model")
    Path(url, "amount.json").write_text("one")
    with pytest.raises(LoadFailed, match="failed to load 'm', amount.json is not a number"):
        await container.load("m", url)

    assert (None, 0) == (served.registry.find("m"), served.capacity.used_bytes)

    await container.load("m", unpack("b/model"))

    assert ["m"] == names(container)


async def test_a_load_that_its_caller_gives_up_is_undone(
    container: MultiModelContainer, served: Core, unpack: Unpack, world: World
) -> None:
    world.may_load.clear()
    loading = asyncio.ensure_future(container.load("m", unpack("a/model")))
    await asyncio.to_thread(world.loading.wait, 10)
    loading.cancel()
    world.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await loading

    assert ([], None, 0) == (world.open, served.registry.find("m"), served.capacity.used_bytes)


async def test_memory_is_asked_of_the_books_before_the_device(
    make_core: MakeCore, archives: Path, unpack: Unpack, world: World
) -> None:
    """The second model is not even opened before the first one is unloaded."""
    core = make_core(model_root=(archives,), capacity_bytes=150)
    container = contain(core)
    await container.load("m", unpack("a/model"))
    url = unpack("b/model")
    with pytest.raises(OutOfMemory, match="it needs 100 bytes on cpu:0, where 50 of 150 are free"):
        await container.load("n", url)

    assert ["m/1"] == world.loads

    await container.unload("m")
    await container.load("n", url)

    assert (["n"], 100) == (names(container), core.capacity.used_bytes)


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
async def test_only_the_explicit_mode_lets_clients_decide(
    make_core: MakeCore, unpack: Unpack, mode: ModelControlMode
) -> None:
    container = contain(make_core(model_control_mode=mode))
    with pytest.raises(ModelControlForbidden):
        await container.load("m", unpack("a/model"))
    with pytest.raises(ModelControlForbidden):
        await container.unload("m")


# # --- valid urls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "versions"),
    [
        ("", ["1"]),
        ("1", ["1"]),
        ("7", ["7"]),
        ("digits/3", ["3"]),
        ("digits", ["1"]),
    ],
)
async def test_an_archive_is_a_version_a_model_or_holds_one(
    container: MultiModelContainer, served: Core, unpack: Unpack, inner: str, versions: list[str]
) -> None:
    url = unpack("a/model", inner=inner)
    await container.load("m", url)
    _, answering = served.control.catalog.describe("m")

    assert (versions, url) == (answering, container.get("m").url)


async def test_what_lies_beside_the_only_model_of_an_archive_does_not_matter(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model", inner="digits/1")
    unpack("a/model/code")
    Path(url, "README.md").touch()
    await container.load("m", url)

    assert ["m"] == names(container)


async def test_a_version_may_have_a_folder(container: MultiModelContainer, unpack: Unpack) -> None:
    """A directory that holds model files is itself the version."""
    url = unpack("a/model")
    Path(url, "assets").mkdir()
    await container.load("m", url)

    assert ["m"] == names(container)


async def test_an_archive_of_several_models_is_none(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model", inner="x/1")
    unpack("a/model/y", inner="1")
    with pytest.raises(LoadFailed, match="holds several models, expected one: 'x', 'y'"):
        await container.load("m", url)


async def test_the_name_in_a_configuration_does_not_count(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model", inner="1")
    Path(url, "config.json").write_text('{"name": "another"}')
    await container.load("m", url)

    assert ["m"] == names(container)


REFUSED_URLS = {
    "/etc": "is outside the model repository and every model_root (--model-root), or a link that"
    " leads outside",
    "/nowhere": "is outside the model repository and every model_root (--model-root), or a link"
    " that leads outside",
    "{archives}/../../../x": "is outside the model repository and every model_root"
    " (--model-root), or a link that leads outside",
    "{archives}/out": "is outside the model repository and every model_root (--model-root), or a"
    " link that leads outside",
    "/dev/shm": "its url points into a kernel file system: '",
    "/dev/../proc/self": "its url points into a kernel file system: '",
    "/proc/self/root{archives}/a/model": "its url points into a kernel file system: '",
    "/sys": "its url points into a kernel file system: '",
    "{archives}/kernel": "its url points into a kernel file system: '",
    "{archives}/nothing": "nothing found at",
    "{archives}/fifo": "is not a regular file",
    "a/model": "is not an absolute path",
    "s3://bucket/model.tar.gz": "is not an absolute path",
    "": "is not an absolute path",
    "/a\0b": "is not an absolute path",
}


@pytest.mark.parametrize(("url", "problem"), REFUSED_URLS.items())
async def test_a_url_leads_to_a_model_inside_the_allowed_roots(
    container: MultiModelContainer, archives: Path, unpack: Unpack, url: str, problem: str
) -> None:
    unpack("a/model")
    (archives / "out").symlink_to("/etc")
    (archives / "kernel").symlink_to("/proc/self")
    os.mkfifo(archives / "fifo")
    with pytest.raises(LoadFailed, match=re.escape(problem)):
        await container.load("m", url.format(archives=archives))


async def test_no_root_makes_the_kernel_hold_models(make_core: MakeCore) -> None:
    container = contain(make_core(model_root=(Path("/"),)))
    with pytest.raises(LoadFailed, match="its url points into a kernel file system: '"):
        await container.load("m", "/dev/shm")


# --- unload ------------------------------------------------------------------------------------


async def test_an_unload_returns_when_the_memory_is_free(
    container: MultiModelContainer, served: Core, unpack: Unpack, world: World
) -> None:
    await container.load("m", unpack("a/model"))

    assert 100 == served.capacity.used_bytes

    await container.unload("m")

    assert (0, [], None) == (served.capacity.used_bytes, world.open, served.registry.find("m"))


async def test_a_model_on_its_way_out_is_waited_for_and_leaves_its_name(
    container: MultiModelContainer, served: Core, unpack: Unpack, world: World
) -> None:
    """Both unloads return once the memory is free; a load sent in between runs after them."""
    await container.load("m", unpack("a/model"))
    _, instance = served.registry.resolve("m")
    url = unpack("b/model", 2)
    leaving = asyncio.Event()
    with instance.lease(), served.registry.observe(leaving.set):
        unloads = [asyncio.ensure_future(container.unload("m"))]
        await leaving.wait()
        unloads.append(asyncio.ensure_future(container.unload("m")))
        load = asyncio.ensure_future(container.load("m", url))
        done, _ = await asyncio.wait([*unloads, load], timeout=0)

        assert (set(), []) == (done, names(container))

    await asyncio.gather(*unloads, load)

    assert ([HostedModel("m", url)], 1) == (list(container.page().models), len(world.open))


@pytest.mark.parametrize("name", ["m", "a"])
async def test_what_is_not_loaded_is_not_found(
    container: MultiModelContainer, add_model: AddModel, name: str
) -> None:
    """This holds whether or not the repository has such a model."""
    add_model("a", {1: 1})
    with pytest.raises(ModelNotFound):
        container.get(name)
    with pytest.raises(ModelNotFound):
        await container.unload(name)


async def test_a_model_that_is_still_loading_is_not_there(
    container: MultiModelContainer, unpack: Unpack, world: World
) -> None:
    world.may_load.clear()
    loading = asyncio.ensure_future(container.load("m", unpack("a/model")))
    await asyncio.to_thread(world.loading.wait, 10)
    with pytest.raises(ModelNotFound):
        container.get("m")
    with pytest.raises(ModelNotFound):
        await container.unload("m")
    world.may_load.set()
    await loading

    assert ["m"] == names(container)


# --- list --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "pages"),
    [
        (2, [["a", "b"], ["c", "d"]]),
        (3, [["a", "b", "c"], ["d"]]),
        (4, [["a", "b", "c", "d"]]),
        (0, [["a", "b", "c", "d"]]),
        (-1, [["a", "b", "c", "d"]]),
        (MAX_PAGE + 1, [["a", "b", "c", "d"]]),
    ],
)
async def test_pages_by_name_without_an_empty_last_one(
    container: MultiModelContainer, unpack: Unpack, limit: int, pages: list[list[str]]
) -> None:
    url = unpack("a/model")
    for name in "dacb":
        await container.load(name, url)
    found, page = [], container.page(limit)
    while True:
        found.append([model.name for model in page.models])
        if not page.last:
            break
        page = container.page(limit, page.last)

    assert pages == found


async def test_a_page_has_a_hundred_models_at_most(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model")
    for index in range(MAX_PAGE + 1):
        await container.load(f"{index:03}", url)
    first = container.page(1000)
    second = container.page(after=first.last)

    assert [100, 1] == [len(first.models), len(second.models)]
    assert "" == second.last


async def test_a_change_between_two_pages_hides_nothing(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model")
    for name in "bcde":
        await container.load(name, url)
    first = container.page(2)
    await container.unload("c")
    await container.load("a", url)
    second = container.page(2, first.last)

    assert (["b", "c"], ["d", "e"]) == (
        [model.name for model in first.models],
        [model.name for model in second.models],
    )


async def test_what_was_loaded_otherwise_is_listed_with_its_directory(
    container: MultiModelContainer, served: Core, add_model: AddModel, unpack: Unpack
) -> None:
    directory = add_model("m", {1: 1})
    url = unpack("a/model")
    await container.load("m", url)
    await container.unload("m")
    await served.control.load("m")

    assert (HostedModel("m", str(directory)),) == container.page().models

    await container.unload("m")

    assert () == container.page().models


async def test_no_model_is_kept_alive_for_the_list(
    container: MultiModelContainer, served: Core, unpack: Unpack
) -> None:
    await container.load("m", unpack("a/model"))
    instance = weakref.ref(served.registry.resolve("m")[1])
    assert instance() is not None
    await served.control.evict("m")
    gc.collect()

    assert instance() is None


# --- the default model -------------------------------------------------------------------------


async def test_the_only_model_is_the_default_one(
    container: MultiModelContainer, unpack: Unpack
) -> None:
    url = unpack("a/model")
    with pytest.raises(NoDefaultModel, match="0 models are loaded and default_model is not set"):
        container.default()
    await container.load("m", url)

    assert "m" == container.default()

    await container.load("n", url)
    with pytest.raises(NoDefaultModel, match="2 models are loaded"):
        container.default()


async def test_a_default_model_that_is_set_counts(served: Core, unpack: Unpack) -> None:
    container = contain(served, "n")
    await container.load("m", unpack("a/model"))

    assert "n" == container.default()


async def test_a_container_without_models_is_healthy_once_it_is_started(
    container: MultiModelContainer, served: Core
) -> None:
    assert not container.healthy

    await served.control.follower.start()

    assert container.healthy

    served.control.begin_shutdown()

    assert not container.healthy


# # --- a single model as the repository ----------------------------------------------------------


def bare(root: Path) -> Repository:
    return Repository(root, max_models=10, max_config_bytes=1 << 20, bare_name="model")


@pytest.mark.parametrize(
    ("path", "found", "versions"),
    [
        ("model.json", ["model"], [1]),
        ("1/model.json", ["model"], [1]),
        ("7/model.json", ["model"], [7]),
        ("digits/1/model.json", ["digits"], [1]),
        ("digits/config.json", ["digits"], []),
    ],
)
def test_a_repository_may_be_the_only_model(
    tmp_path: Path, path: str, found: list[str], versions: list[int]
) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    repository = bare(tmp_path)
    (name,) = repository.names()

    assert found == [name]
    assert repository.holds(name)
    assert not repository.holds("other")
    if versions:
        assert versions == [version.number for version in repository.find(name).versions]


def test_an_empty_repository_is_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A container without its model must not become ready."""
    (source,) = bare(tmp_path).find("model").versions

    assert (["model"], tmp_path) == (bare(tmp_path).names(), source.directory)


def test_the_configuration_of_the_only_model_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "config.json").write_text('{"name": "another", "max_batch_size": 2}')
    repository = bare(tmp_path)
    replaced = repository.find("model", config_text='{"max_batch_size": 4}')

    assert [2, 4] == [
        repository.find("model").config.max_batch_size,
        replaced.config.max_batch_size,
    ]
    assert repository.fingerprint("model")
    with pytest.raises(LoadFailed, match="failed to load 'model', "):
        repository.find("model", config_text="{")


def test_a_repository_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models", max_models=10, max_config_bytes=1 << 20)

    assert [] == repository.names()
