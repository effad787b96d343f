"""Opens the status page in a browser once a server has started: `xlaserve serve --open`."""

import threading
import webbrowser
from collections.abc import Sequence

from xlaserve.app.display import Addresses, Display, ModelRow
from xlaserve.errors import InvalidSettings
from xlaserve.process.endpoints import NO_ENDPOINT
from xlaserve.runtime.loaded import Stage
from xlaserve.settings import Settings
from xlaserve.settings.choices import TlsEndpoint

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def check(settings: Settings) -> None:
    """Raise InvalidSettings if no status page is served."""
    if settings.http_endpoint == NO_ENDPOINT:
        raise InvalidSettings("http_endpoint", "an HTTP endpoint with --open", NO_ENDPOINT)
    if settings.http_endpoint.startswith("unix:"):
        got = settings.http_endpoint
        raise InvalidSettings("http_endpoint", "a TCP address with --open", got)
    if settings.processes > 1:
        raise InvalidSettings("processes", "1 with --open", str(settings.processes))


def is_tls(settings: Settings) -> bool:
    """Tell whether the page is served over TLS."""
    return bool(settings.tls_certificate) and TlsEndpoint.HTTP in settings.tls_endpoints


class PageOpener:
    """Opens the status page after startup, and delegates to another display."""

    def __init__(self, display: Display, *, is_tls: bool) -> None:
        self._display = display
        self._scheme = "https" if is_tls else "http"
        self._address = ""

    def listening(self, addresses: Addresses) -> None:
        """Remember the address of the page."""
        host, _, port = (addresses.http or "").rpartition(":")
        self._address = f"{_EVERYWHERE.get(host, host)}:{port}"
        self._display.listening(addresses)

    def stage(self, model: str, version: str, stage: Stage) -> None:
        """Show a stage of a load."""
        self._display.stage(model, version, stage)

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Open the page in a thread, since a terminal browser blocks until it is closed."""
        self._display.started(rows)
        url = f"{self._scheme}://{self._address}/"
        threading.Thread(target=webbrowser.open, args=(url,), name="open-page", daemon=True).start()
