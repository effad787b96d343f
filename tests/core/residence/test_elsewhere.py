"""A process that loads no models forwards its clients' changes to the one that does."""

from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, cast

import pytest
from support.core import AddModel, Core, World

from xlaserve.concurrency.control_plane import Change, ChangeKind, OneProcess
from xlaserve.errors import Unsupported
from xlaserve.serving.call import Call, Sight, current_call

T = TypeVar("T")


class Front(OneProcess):
    """The control plane of a front end, which records the changes it is asked for."""

    loads = False

    def __init__(self) -> None:
        self.changes: list[Change] = []

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        self.changes.append(change)
        return cast(T, None)


class OnlyM:
    """The visibility of a caller that may see only the model `m`."""

    def permits(self, model: str) -> bool:
        return model == "m"

    def shows(self, model: str) -> bool:
        return model == "m"

    def refuse_server(self) -> None: ...


@pytest.fixture(name="front")
def a_front_end(core: Core) -> Front:
    front = Front()
    core.control.plane = front
    return front


@pytest.fixture(name="limited")
def a_limited_caller() -> Iterator[None]:
    """Run the test as a caller that may not see every model."""
    call = Call()
    call.sight = cast(Sight, OnlyM())
    token = current_call.set(call)
    yield
    current_call.reset(token)


async def test_a_load_is_made_elsewhere(core: Core, add_model: AddModel, front: Front) -> None:
    """The front end loads nothing itself."""
    add_model("m", {1: 1})
    await core.control.load("m")

    assert [(ChangeKind.LOAD, "m")] == [(one.kind, one.subject) for one in front.changes]
    assert core.registry.find("m") is None


async def test_a_front_end_that_ends_unloads_nothing(
    core: Core, add_model: AddModel, world: World
) -> None:
    """Its registry shows the engine's models, and freeing memory would import JAX."""
    world.may_load.set()
    add_model("m", {1: 1})
    await core.control.load("m")
    core.control.plane = Front()
    await core.control.close()
    is_ready = core.registry.ready("m")
    core.control.plane = OneProcess()
    await core.control.close()

    assert (True, False) == (is_ready, core.registry.ready("m"))


@pytest.mark.usefixtures("limited")
async def test_what_another_process_would_see_for_a_caller_is_refused(
    core: Core, add_model: AddModel, front: Front
) -> None:
    """The engine does not know the caller: an ensemble could reach models hidden from it."""
    add_model("m", {1: 1})
    core.registry.version("m", "1")
    with pytest.raises(Unsupported, match="process_roles"):
        await core.control.load("m", {"config": "{}"})
    with pytest.raises(Unsupported, match="process_roles"):
        await core.control.unload("m", {"unload_dependents": True})
    await core.control.load("m")

    assert [ChangeKind.LOAD] == [one.kind for one in front.changes]


async def test_an_unload_with_dependents_says_so_to_who_knows_them(
    core: Core, add_model: AddModel, front: Front
) -> None:
    """Only the process that loaded an ensemble knows which models it loaded for it."""
    add_model("m", {1: 1})
    core.registry.version("m", "1")
    await core.control.unload("m", {"unload_dependents": True})

    assert [{"models": ["m"], "dependents": True}] == [one.arguments for one in front.changes]
