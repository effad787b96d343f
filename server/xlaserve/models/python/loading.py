"""A version directory with a model.py becomes a model whose code runs in this process."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from xlaserve.errors import InvalidModel, LoadCancelled
from xlaserve.models import placement
from xlaserve.models.config import ModelConfig
from xlaserve.models.loaded import LoadContext, ModelInfo, Stage
from xlaserve.models.python.author import PythonModel
from xlaserve.models.python.code import FILE_NAME, ModelCode
from xlaserve.models.python.context import Context
from xlaserve.models.python.copies import Copy, OwnCopy, is_async, is_generator, takes_request
from xlaserve.models.python.declared import agreed, asks_for_batches
from xlaserve.models.python.failures import described, failure
from xlaserve.models.python.host import PythonHost
from xlaserve.models.python.loaded import PLATFORM, LoadedPython, close_all

CONCURRENCY = 64
"""The most requests that one copy of a model with an `async` method works on at a time."""

SETTING = "--allow-python-models"


def load(directory: Path, context: LoadContext) -> LoadedPython:
    """Run model.py of a version directory, and return its model, ready.

    Raises InvalidModel where the operator does not allow it, for code that came with a request, and
    for code that raises.
    """
    host = _allowed(context)
    code = ModelCode(directory, context.roots)

    def forget() -> None:
        host.metrics.forget(code)
        code.close()

    copies: list[Copy] = []
    try:
        return _load(code, context, copies, forget)
    except (InvalidModel, LoadCancelled):
        close_all(copies, forget)
        raise
    except BaseException as error:
        close_all(copies, forget)
        failure(context.model, error, "load")
        raise InvalidModel(f"{FILE_NAME} raised {described(error)}") from error


def _allowed(context: LoadContext) -> PythonHost:
    if context.is_sent:
        raise InvalidModel(
            f"{FILE_NAME} came with the request, and the code of a client is never run: put it "
            "into the model repository"
        )
    if context.python is None:
        raise InvalidModel(f"it is code ({FILE_NAME}), which this server runs only with {SETTING}")
    return context.python


def _load(
    code: ModelCode, context: LoadContext, copies: list[Copy], forget: Callable[[], None]
) -> LoadedPython:
    kind = _class_of(code.load())
    config = context.config
    signature = agreed(config, kind)
    info = ModelInfo(PLATFORM, signature.inputs, signature.outputs, signature.max_batch_size)
    is_batched = _is_batched(kind, config, info)
    count = _count(config, context.device)
    for replica in range(count):
        context.check_cancelled()
        context.on_stage(Stage("running its load", replica + 1, count))
        own = Context(
            context.model,
            context.version,
            code.directory,
            replica,
            config.parameters,
            context.python,
            code,
        )
        copy = OwnCopy(kind(), own, info, is_batched=is_batched)
        copies.append(copy)
        copy.load()
    return LoadedPython(
        info,
        copies,
        is_batched=is_batched,
        is_decoupled=is_generator(kind.infer),
        concurrency=CONCURRENCY if is_async(kind.infer) else 1,
        forget=forget,
    )


def _class_of(module: ModuleType) -> type[PythonModel]:
    """Return the one subclass of PythonModel that a module defines."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PythonModel)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise InvalidModel(
            f"{FILE_NAME}: expected one class that is a xlaserve.PythonModel, got {names}"
        )
    return found[0]


def _is_batched(kind: type[PythonModel], config: ModelConfig, info: ModelInfo) -> bool:
    wanted = kind.batched or asks_for_batches(config)
    if not wanted or not info.max_batch_size:
        if kind.batched:
            raise InvalidModel("its class is batched: expected a max_batch_size above 0, got 0")
        return False
    if is_generator(kind.infer) or is_async(kind.infer) or takes_request(kind):
        raise InvalidModel(
            "its requests are to be put together: expected an infer that is a function of the "
            "inputs alone"
        )
    return True


def _count(config: ModelConfig, platform: str) -> int:
    """Return how many copies there are: those of all instance groups; raises InvalidModel."""
    groups = placement.read(config, platform).groups
    return sum(group.count * len(group.devices or (0,)) for group in groups)
