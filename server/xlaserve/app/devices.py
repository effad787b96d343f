"""Starts JAX and its devices."""

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.runtime.devices import device
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.settings import Settings

_log = structlog.get_logger("app")


class DeviceStart:
    """Starts JAX, with the compilation cache if its directory is usable."""

    def __init__(self, settings: Settings, programs: Compilation) -> None:
        self._settings = settings
        self._programs = programs
        self._is_logged = False
        """Whether the warning about the unusable cache directory was logged."""

    def __call__(self) -> str:
        """Start JAX if necessary, and return the platform; blocks.

        Raises DeviceUnavailable, or InvalidSettings if the compilation cache directory in the
        settings cannot be used.
        """
        settings = self._settings
        requested, fraction = settings.device.value, settings.gpu_memory_fraction
        try:
            return device.start(requested, self._programs.cache, memory_fraction=fraction)
        except InvalidSettings as error:
            if settings.compilation_cache_directory != compilation.AUTO:
                raise
            # The default directory cannot be used: run without a compilation cache.
            if not self._is_logged:
                self._is_logged = True
                _log.warning("compiled programs not kept", reason=str(error))
            return device.start(requested, memory_fraction=fraction)
