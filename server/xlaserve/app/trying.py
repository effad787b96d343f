"""Trial loads of clients' files, in a process of their own."""

from collections.abc import Callable
from pathlib import Path

from xlaserve.artifact import onnx_source
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders, trial
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.settings import Settings


def beginning(compilation: Compilation, start_device: Callable[[], str]) -> Callable[[], None]:
    """Return the work that a load can start alongside its trial."""
    return lambda: loaders.begin(compilation, start_device())


def try_loading(
    settings: Settings,
    begin: Callable[[], None],
    directory: Path,
    config: ModelConfig,
    check_cancelled: Callable[[], None],
) -> None:
    """Return if such a process can load a version directory, or none is wanted. Blocks.

    Raises InvalidModel, and what `check_cancelled` raises.
    """
    if settings.trial_seconds:
        trial.try_loading(
            directory,
            settings.trial_seconds,
            config.parameters,
            onnx_source.find(directory, config),
            memory_bytes=settings.compile_process_bytes,
            begin=begin,
            check_cancelled=check_cancelled,
        )
