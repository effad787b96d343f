"""Starts the devices that models are loaded on."""

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.models import compilation, device
from xlaserve.models.compilation import Compilation
from xlaserve.settings import Settings

_log = structlog.get_logger("app")


def start_device(settings: Settings, programs: Compilation) -> str:
    """Start JAX and return the platform of the models; blocks.

    Raises DeviceUnavailable, or InvalidSettings for a directory of programs that cannot be used.
    """
    asked, fraction = settings.device.value, settings.gpu_memory_fraction
    try:
        return device.start(asked, programs.cache, memory_fraction=fraction)
    except InvalidSettings as error:
        if settings.compilation_cache_directory != compilation.AUTO:
            raise
        # It holds nothing as long as it is not prepared.
        _log.warning("compiled programs are not kept", reason=str(error))
        return device.start(asked, memory_fraction=fraction)
