"""Trial loads of models in a separate process, which may crash."""

from collections.abc import Callable
from pathlib import Path

from xlaserve.artifact import onnx_source
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders, trial
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.settings import Settings


def beginning(compilation: Compilation, start_device: Callable[[], str]) -> Callable[[], None]:
    """Return a function that starts the device and a compilation process during a trial load."""
    return lambda: loaders.begin(compilation, start_device())


def try_loading(
    settings: Settings,
    begin: Callable[[], None],
    directory: Path,
    config: ModelConfig,
    check_cancelled: Callable[[], None],
) -> None:
    """Load a version directory in a separate process as a trial, if enabled; blocks.

    Raises InvalidModel if the trial fails, and the errors of `check_cancelled`.
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
