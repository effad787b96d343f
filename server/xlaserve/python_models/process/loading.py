"""Loads a Python model whose replicas are processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xlaserve.python_models.loaded import PLATFORM, LoadedPython, close_all
from xlaserve.python_models.process.beginning import Beginning
from xlaserve.python_models.process.copies import ProcessCopy
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelInfo, ModelMemory, Stage
from xlaserve.tensors import DATATYPES, TensorSpec


def in_processes(
    directory: Path, context: LoadContext, host: PythonHost, count: int
) -> LoadedPython:
    """Start one process per replica, and return the loaded model; raises InvalidModel."""
    owner = object()
    forget = _forgetting(host, owner)
    copies: list[ProcessCopy] = []
    try:
        for replica in range(count):
            context.check_cancelled()
            context.on_stage(Stage("starting its process", replica + 1, count))
            header = _beginning(directory, context, replica)
            seconds = host.process_seconds
            beginning = Beginning(header, host, owner, seconds, context.check_cancelled)
            copies.append(ProcessCopy(beginning))
            copies[-1].load()
    except BaseException:
        close_all(copies, forget)
        raise
    made = copies[0].loaded.result()
    info = ModelInfo(
        PLATFORM,
        _specs(made["inputs"]),
        _specs(made["outputs"]),
        made["max_batch_size"],
        memory=_memory(copies),
        is_decoupled=made["is_decoupled"],
        optional=dict.fromkeys(made["optional"]),
        ragged=frozenset(made["ragged"]),
        takes_parameters=True,
        takes_tensor_parameters=made["takes_tensor_parameters"],
        is_lenient=made["is_lenient"],
    )
    loaded = LoadedPython(
        context.model,
        info,
        copies,
        is_batched=made["is_batched"],
        concurrency=made["concurrency"],
        forget=forget,
    )

    def measure() -> None:
        loaded.info = replace(loaded.info, memory=_memory(copies))
        host.memory_changed(context.model)

    for copy in copies:
        copy.on_memory = measure
    return loaded


def _memory(copies: Sequence[ProcessCopy]) -> ModelMemory:
    return ModelMemory(parameters_bytes=sum(copy.resident_bytes for copy in copies))


def described(info: ModelInfo, *, is_batched: bool, concurrency: int) -> dict[str, Any]:
    """Return the description of a loaded model, for a message to the server."""
    return {
        "inputs": [(one.name, one.datatype.name, one.shape) for one in info.inputs],
        "outputs": [(one.name, one.datatype.name, one.shape) for one in info.outputs],
        "optional": list(info.optional),
        "ragged": list(info.ragged),
        "max_batch_size": info.max_batch_size,
        "is_decoupled": info.is_decoupled,
        "takes_tensor_parameters": info.takes_tensor_parameters,
        "is_lenient": info.is_lenient,
        "is_batched": is_batched,
        "concurrency": concurrency,
    }


def _forgetting(host: PythonHost, owner: object) -> Callable[[], None]:
    return lambda: host.metrics.forget(owner)


def _beginning(directory: Path, context: LoadContext, replica: int) -> Mapping[str, Any]:
    config = context.config
    return {
        "kind": "load",
        "model": context.model,
        "version": context.version,
        "directory": str(directory),
        "device": context.device,
        "roots": [str(root) for root in context.roots.directories],
        "config": config.message.to_json() if config.message is not None else "",
        "is_unbatched": config.is_unbatched,
        "replica": replica,
    }


def _specs(specs: Sequence[Any]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, DATATYPES[kind], tuple(shape)) for name, kind, shape in specs)
