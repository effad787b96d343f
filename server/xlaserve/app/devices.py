"""Starts the devices that models are loaded on."""

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.runtime.devices import device
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.settings import Settings

_log = structlog.get_logger("app")


class DeviceStart:
    """Starts JAX at the first load."""

    def __init__(self, settings: Settings, programs: Compilation) -> None:
        self._settings = settings
        self._programs = programs
        self._is_told = False
        """Whether the log says by now why programs are not kept."""

    def __call__(self) -> str:
        """Return the platform of the models; blocks.

        Raises DeviceUnavailable, or InvalidSettings for a directory of programs that cannot be
        used.
        """
        settings = self._settings
        asked, fraction = settings.device.value, settings.gpu_memory_fraction
        try:
            return device.start(asked, self._programs.cache, memory_fraction=fraction)
        except InvalidSettings as error:
            if settings.compilation_cache_directory != compilation.AUTO:
                raise
            # It holds nothing as long as it is not prepared.
            if not self._is_told:
                self._is_told = True
                _log.warning("compiled programs not kept", reason=str(error))
            return device.start(asked, memory_fraction=fraction)
