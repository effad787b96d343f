"""Hosts and origins that browsers may send requests from (RFC 9110, 7.2; RFC 6454).

A page of another site can have a browser send requests here: it names its own origin then, or,
where its name was made to resolve to this machine (DNS rebinding), itself as the host. An address
cannot be made to resolve to another one, so any is taken as a host.
"""

import re
import socket
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from types import MappingProxyType

from xlaserve.errors import InvalidSettings
from xlaserve.errors.access import WrongHost, WrongOrigin
from xlaserve.serving.call import UNIX, Headers, Peer
from xlaserve.settings import Settings

ANY = "*"
_LOOPBACK = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\[\]:,\s]+)(:[0-9]{0,5})?")
_NAME = re.compile(r"[0-9A-Za-z_.-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_NAMES = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z, ]+")
_NONE: Mapping[str, str] = MappingProxyType({})
_PORTS: Mapping[str, str] = {"http": ":80", "https": ":443"}


class Origins:
    """Names of this server, and allowed origins (Fetch, 3.3)."""

    def __init__(self, hosts: Iterable[str] = (ANY,), origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts) | _LOOPBACK
        self._origins = frozenset(origin.lower() for origin in origins)

    @classmethod
    def of(cls, settings: Settings) -> "Origins":
        """Return what the settings say; raises InvalidSettings for what is no name, or no origin.

        A server that others than this machine reach is known by the name of the machine too, and
        one of SageMaker by whatever the platform calls it.
        """
        hosts = [*settings.allowed_host, settings.host, socket.gethostname()]
        if settings.sagemaker and not settings.allowed_host:
            hosts.append(ANY)
        for host in settings.allowed_host:
            if host != ANY and _NAME.fullmatch(host) is None:
                raise InvalidSettings("allowed_host", "a name without a port, or *", host)
        for origin in settings.cors_origin:
            if origin != ANY and _ORIGIN.fullmatch(origin.lower()) is None:
                expected = "an origin, as https://app.example:8443, or *"
                raise InvalidSettings("cors_origin", expected, origin)
        return cls(hosts, settings.cors_origin)

    @property
    def are_open(self) -> bool:
        """Tell whether pages of other origins are allowed."""
        return bool(self._origins)

    def check(self, headers: Headers, peer: Peer) -> str | None:
        """Return the foreign origin that a request comes from, which is one of those that may.

        None for a request of no page, or of a page of this server. Raises WrongHost or WrongOrigin.
        No browser opens a unix socket, and clients write there as host whatever they like; but for
        a trusted proxy, which is a browser's way to one.
        """
        host = headers.get("host")
        is_checked = peer.address != UNIX or peer.proxy
        if host is not None and is_checked and not self.is_named(host):
            raise WrongHost(host)
        origin = headers.get("origin")
        if origin is None or _is_of(origin.lower(), (host or "").lower(), peer.scheme):
            return None
        if not self.allows(origin):
            raise WrongOrigin
        return origin

    def is_named(self, host: str) -> bool:
        """Tell whether a host is one of the names of this server."""
        if ANY in self._hosts:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower().strip("[]")
        return name.rstrip(".") in self._hosts or _is_address(name)

    def allows(self, origin: str) -> bool:
        """Tell whether pages of an origin are allowed."""
        return ANY in self._origins or origin.lower() in self._origins

    def answer_headers(self, headers: Headers) -> Mapping[str, str]:
        """Return the CORS headers for a page of an allowed origin."""
        origin = headers.get("origin") if self._origins else None
        if origin is None or not self.allows(origin):
            return _NONE
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Inference-Header-Content-Length, Retry-After",
            "Vary": "Origin",
        }

    def preflight(self, method: str, headers: Headers) -> Mapping[str, str] | None:
        """Return the headers that answer a browser which asks whether a page may ask (Fetch, 4.8).

        None for any other request. Browsers show no credentials with it: the answer is the same
        whatever is asked for, and whether it is there.
        """
        if method != "OPTIONS" or headers.get("access-control-request-method") is None:
            return None
        origin = headers.get("origin")
        if origin is None or not self.allows(origin):
            return None
        asked = headers.get("access-control-request-headers") or ""
        named = {"Access-Control-Allow-Headers": asked} if _NAMES.fullmatch(asked) else {}
        return {
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
            "Access-Control-Max-Age": "600",
            **named,
        }


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_of(origin: str, host: str, asked: str) -> bool:
    """Tell whether an origin is that of a host, of which the usual port may be left out.

    `asked` is the scheme of the request; empty where it is not known.
    """
    scheme, _, authority = origin.partition("://")
    port = _PORTS.get(scheme)
    if port is None or not authority or not host or asked not in ("", scheme):
        return False
    return authority.removesuffix(port) == host.removesuffix(port)
