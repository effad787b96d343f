"""Loads a Python model: imports its model.py and creates the replicas."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from xlaserve.artifact.signature import Signature
from xlaserve.errors import InvalidModel, LoadCancelled
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.fields import STRICT_OUTPUTS
from xlaserve.python_models.author import PythonModel
from xlaserve.python_models.code import FILE_NAME, ModelCode
from xlaserve.python_models.context import Context
from xlaserve.python_models.copies import Copy, OwnCopy, is_async, is_generator, takes_request
from xlaserve.python_models.declared import agreed, asks_for_batches
from xlaserve.python_models.failures import described, failure
from xlaserve.python_models.loaded import PLATFORM, LoadedPython, close_all
from xlaserve.python_models.process.loading import in_processes
from xlaserve.python_models.triton import module
from xlaserve.python_models.triton.config import as_dict, completed
from xlaserve.python_models.triton.copies import TritonCopy
from xlaserve.python_models.triton.outputs import GivenOutputs
from xlaserve.runtime.config_served import ServedConfig
from xlaserve.runtime.devices import placement
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelInfo, Stage
from xlaserve.runtime.wrappers import optional_inputs

CONCURRENCY = 64
"""Maximum number of concurrent requests per replica of a model with an `async` method."""

SETTING = "--allow-python-models"


def load(directory: Path, context: LoadContext) -> LoadedPython:
    """Import model.py from a version directory, and return the loaded model.

    Raises InvalidModel if the operator has not enabled Python models, if the model's files came
    with the request, or if its code raises.
    """
    host = _allowed(context)
    _file_name(directory, context)
    if _execution(context.config) == "process":
        return in_processes(directory, context, host, _count(context.config, context.device))
    making = make_here(directory, context)
    copies: list[Copy] = []
    try:
        for replica in range(making.count):
            context.check_cancelled()
            context.on_stage(Stage("running its load", replica + 1, making.count))
            copies.append(making.make(replica))
            copies[-1].load()
    except BaseException as error:
        close_all(copies, making.forget)
        raise _as_invalid(context, error) from error
    return LoadedPython(
        context.model,
        making.info,
        copies,
        is_batched=making.is_batched,
        concurrency=making.concurrency,
        forget=making.forget,
    )


def make_here(directory: Path, context: LoadContext) -> "Making":
    """Import model.py in this process, and return its class with everything to create replicas.

    Raises InvalidModel.
    """
    host = _allowed(context)
    code = ModelCode(directory, context.roots, _file_name(directory, context))
    code.offer(module.NAME, module.module_of(context.model, directory, host, code))

    def forget() -> None:
        host.metrics.forget(code)
        code.close()

    try:
        return _making(code, context, forget)
    except BaseException as error:
        forget()
        raise _as_invalid(context, error) from error


def _as_invalid(context: LoadContext, error: BaseException) -> BaseException:
    """Return the error that the load raises for an exception of the model's code."""
    if isinstance(error, InvalidModel | LoadCancelled):
        return error
    failure(context.model, error, "load")
    name = context.config.default_model_filename or FILE_NAME
    return InvalidModel(f"{name} raised {described(error)}")


def _execution(config: ModelConfig) -> str:
    found = config.parameters.get("execution", "threads")
    if found not in ("threads", "process"):
        raise InvalidModel(
            f"parameter 'execution': expected threads or process, got '{found[:64]}'"
        )
    return found


def _allowed(context: LoadContext) -> PythonHost:
    if context.is_sent:
        raise InvalidModel(
            f"{FILE_NAME} came with the request, but code from clients is never run: put it into"
            " the model repository"
        )
    if context.python is None:
        raise InvalidModel(
            f"it is code ({FILE_NAME}), which runs only if the server is started with {SETTING}"
        )
    return context.python


def _file_name(directory: Path, context: LoadContext) -> str:
    name = context.config.default_model_filename or FILE_NAME
    stem, _, suffix = name.rpartition(".")
    if not stem.isidentifier() or suffix != "py":
        raise InvalidModel(
            f"default_model_filename: expected the name of a module, got '{name[:200]}'"
        )
    if not (directory / name).is_file():
        raise InvalidModel(f"{name} is missing")
    return name


@dataclass(frozen=True, slots=True)
class Making:
    """A model whose class is known, before its replicas are created."""

    info: ModelInfo
    make: Callable[[int], Copy]
    """Creates the replica with this index; runs the class's `__init__`."""
    count: int
    is_batched: bool
    concurrency: int
    forget: Callable[[], None]
    """Drops the model's modules and metrics; called after every replica has stopped."""


def _making(code: ModelCode, context: LoadContext, forget: Callable[[], None]) -> Making:
    found = code.load()
    kind = getattr(found, "TritonPythonModel", None)
    if isinstance(kind, type):
        made = _tritons(kind, code, context)
    else:
        made = _own(_class_of(found), code, context)
    return replace(made, forget=forget)


def _own(kind: type[PythonModel], code: ModelCode, context: LoadContext) -> Making:
    config = context.config
    if config.sequence_batching is not None and config.sequence_batching.is_iterative:
        raise InvalidModel(
            "sequence_batching.iterative_sequence: expected a TritonPythonModel, which"
            " reschedules its requests; for an infer that is a generator, remove the field"
        )
    is_decoupled = is_generator(kind.infer)
    info = _info(agreed(config, kind), config, is_decoupled=is_decoupled, is_own=True)
    if config.is_decoupled and not is_decoupled:
        raise InvalidModel(
            "model_transaction_policy.decoupled: expected false, since its infer is not a generator"
        )
    is_batched = _is_batched(kind, config, info)

    def make(replica: int) -> Copy:
        own = Context(
            context.model,
            context.version,
            code.directory,
            replica,
            config.parameters,
            context.python,
            code,
        )
        return OwnCopy(kind(), own, info, is_batched=is_batched)

    concurrency = CONCURRENCY if is_async(kind.infer) else 1
    return Making(info, make, _count(config, context.device), is_batched, concurrency, code.close)


def _tritons(kind: type, code: ModelCode, context: LoadContext) -> Making:
    execute = getattr(kind, "execute", None)
    if not callable(execute):
        raise InvalidModel("its TritonPythonModel has no method 'execute'")
    config = completed(context.model, context.config, kind)
    _check_environment(config)
    is_strict = _is_strict(config)
    info = _info(agreed(config, None), config, is_decoupled=config.is_decoupled, is_own=False)
    info = replace(info, is_lenient=not is_strict)
    given = GivenOutputs(context.model, info.outputs, batched=bool(info.max_batch_size))
    kinds = _instance_kinds(config, context.device)
    message = ServedConfig(context.model, config, info).message()
    args = {
        "model_config": json.dumps(as_dict(message)),
        "model_instance_device_id": "0",
        "model_repository": str(code.directory.parent),
        "model_version": context.version,
        "model_name": context.model,
    }

    def make(replica: int) -> Copy:
        own = {
            **args,
            "model_instance_kind": kinds[replica],
            "model_instance_name": f"{context.model}_{replica}",
        }
        return TritonCopy(
            kind(),
            own,
            replica,
            info,
            is_iterative=is_iterative,
            given=None if is_strict else given,
        )

    sequences = config.sequence_batching
    is_iterative = sequences is not None and sequences.is_iterative
    is_gathered = asks_for_batches(config) or sequences is not None
    is_batched = is_gathered and bool(info.max_batch_size)
    # Requests of one sequence are executed one at a time.
    is_concurrent = is_async(execute) and (config.is_decoupled or sequences is None)
    concurrency = CONCURRENCY if is_concurrent else 1
    return Making(info, make, len(kinds), is_batched, concurrency, code.close)


def _info(
    signature: Signature, config: ModelConfig, *, is_decoupled: bool, is_own: bool
) -> ModelInfo:
    return ModelInfo(
        PLATFORM,
        signature.inputs,
        signature.outputs,
        signature.max_batch_size,
        is_decoupled=is_decoupled,
        optional=optional_inputs.of_code(config),
        ragged=frozenset(one.name for one in config.inputs if one.is_ragged),
        takes_parameters=True,
        # Triton's interface has no parameters on tensors.
        takes_tensor_parameters=is_own,
    )


def _is_strict(config: ModelConfig) -> bool:
    """Tell whether outputs that do not match the configuration are rejected."""
    found = config.parameters.get(STRICT_OUTPUTS, "false").lower()
    if found not in ("true", "false"):
        raise InvalidModel(
            f"parameter '{STRICT_OUTPUTS}': expected true or false, got '{found[:64]}'"
        )
    return found == "true"


def _check_environment(config: ModelConfig) -> None:
    """Raise InvalidModel if the configuration asks for a separate Python environment."""
    if "EXECUTION_ENV_PATH" in config.parameters:
        raise InvalidModel(
            "parameter 'EXECUTION_ENV_PATH': not available, since code runs in the server's"
            " Python environment: install its dependencies there"
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
            f"{FILE_NAME}: expected a TritonPythonModel, or one subclass of xlaserve.PythonModel,"
            f" got {names}"
        )
    return found[0]


def _is_batched(kind: type[PythonModel], config: ModelConfig, info: ModelInfo) -> bool:
    wanted = kind.batched or asks_for_batches(config)
    if not wanted or not info.max_batch_size:
        if kind.batched:
            raise InvalidModel("its class is batched: expected a max_batch_size above 0, got 0")
        return False
    if kind.decoded:
        raise InvalidModel(
            "batching requests needs decoded = False, since each request may have its own content"
            " types"
        )
    if info.ragged:
        raise InvalidModel(
            f"input '{min(info.ragged)}': allow_ragged_batch needs a class that is not batched,"
            " since infer gets the rows of several requests"
        )
    if is_generator(kind.infer) or is_async(kind.infer) or takes_request(kind):
        raise InvalidModel("batching requests needs an infer whose only argument is the inputs")
    return True


def _count(config: ModelConfig, platform: str) -> int:
    """Return the number of replicas in all instance groups; raises InvalidModel."""
    return len(_instance_kinds(config, platform))


def _instance_kinds(config: ModelConfig, platform: str) -> tuple[str, ...]:
    """Return Triton's instance kind of each replica; raises InvalidModel."""
    return tuple(
        "MODEL" if group.is_of_model else "CPU"
        for group in placement.read(config, platform).groups
        for _ in range(group.count * len(group.devices or (0,)))
    )
