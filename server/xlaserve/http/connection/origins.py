"""Allowed hosts and origins of requests from browsers (RFC 9110, 7.2; RFC 6454).

A page of another site can make a browser send requests to this server. Such a request has the
page's origin, or, after DNS rebinding, the site's name as its host. IP addresses cannot be rebound,
so every address is accepted as a host.
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
    """The names of this server, and the allowed origins (Fetch, 3.3)."""

    def __init__(self, hosts: Iterable[str] = (ANY,), origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts) | _LOOPBACK
        self._origins = frozenset(origin.lower() for origin in origins)

    @classmethod
    def of(cls, settings: Settings) -> "Origins":
        """Create the rules from the settings; raises InvalidSettings for an invalid name or origin.

        The names include this machine's host name. On SageMaker, every host is accepted unless
        `allowed_host` is set.
        """
        hosts = [*settings.allowed_host, settings.host, socket.gethostname()]
        if settings.sagemaker and not settings.allowed_host:
            hosts.append(ANY)
        for host in settings.allowed_host:
            if host != ANY and _NAME.fullmatch(host) is None:
                raise InvalidSettings("allowed_host", "a name without a port, or *", host)
        for origin in settings.cors_origin:
            if origin != ANY and _ORIGIN.fullmatch(origin.lower()) is None:
                expected = "an origin, such as https://app.example:8443, or *"
                raise InvalidSettings("cors_origin", expected, origin)
        return cls(hosts, settings.cors_origin)

    @property
    def are_open(self) -> bool:
        """Tell whether pages of other origins are allowed."""
        return bool(self._origins)

    def check(self, headers: Headers, peer: Peer) -> str | None:
        """Return the allowed foreign origin of a request.

        Returns None if the request has no origin or the server's own. Raises WrongHost or
        WrongOrigin. The host is not checked on a unix socket, which browsers cannot open and
        where clients send arbitrary hosts, unless a trusted proxy forwards the request.
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
        """Tell whether a host is a name of this server."""
        if ANY in self._hosts:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower().strip("[]")
        return name.rstrip(".") in self._hosts or _is_address(name)

    def allows(self, origin: str) -> bool:
        """Tell whether pages from an origin are allowed."""
        return ANY in self._origins or origin.lower() in self._origins

    def answer_headers(self, headers: Headers) -> Mapping[str, str]:
        """Return the CORS headers for a page with an allowed origin."""
        origin = headers.get("origin") if self._origins else None
        if origin is None or not self.allows(origin):
            return _NONE
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Inference-Header-Content-Length, Retry-After",
            "Vary": "Origin",
        }

    def preflight(self, method: str, headers: Headers) -> Mapping[str, str] | None:
        """Return the headers that answer a CORS preflight request (Fetch, 4.8).

        Returns None for any other request. A preflight has no credentials, so the response must not
        depend on the path or on whether it exists.
        """
        if method != "OPTIONS" or headers.get("access-control-request-method") is None:
            return None
        origin = headers.get("origin")
        if origin is None or not self.allows(origin):
            return None
        requested = headers.get("access-control-request-headers") or ""
        named = {"Access-Control-Allow-Headers": requested} if _NAMES.fullmatch(requested) else {}
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


def _is_of(origin: str, host: str, request_scheme: str) -> bool:
    """Tell whether an origin and a host are the same; either may omit the default port.

    `request_scheme` is the scheme of the request, or an empty string if it is unknown.
    """
    scheme, _, authority = origin.partition("://")
    port = _PORTS.get(scheme)
    if port is None or not authority or not host or request_scheme not in ("", scheme):
        return False
    return authority.removesuffix(port) == host.removesuffix(port)
