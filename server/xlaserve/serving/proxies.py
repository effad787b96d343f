"""Trusted proxies, and the client addresses that they report."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from xlaserve.errors import InvalidSettings
from xlaserve.serving.call import UNIX, Headers, Peer

HEADERS = ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-prefix", "forwarded")
"""Headers by which a proxy reports its client; in lower case."""
TRACES = ("x-forwarded-for", "forwarded", "via")
"""Headers whose presence shows that a request came through a proxy."""
_MOST_HOPS = 32
"""Number of hops examined, counted from the right."""
_MOST_CLIENTS = 64
"""Number of cached clients per proxy connection."""
_MOST_HOSTS = 4096
"""Number of cached decisions about trusted hosts."""
_MOST_CHARACTERS = 1024
"""Longer headers are parsed but not cached."""
_SCHEMES = frozenset({"http", "https"})
_PREFIX = re.compile(r"(/[0-9A-Za-z._~!$&'()*+,;=:@%-]+)+/?")
"""A valid path prefix; `//host` would be a URL of another server."""
_PAIR = re.compile(
    r"\s*(?:([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:([^\s\",;]+)|\"((?:[^\"\\]|\\.)*)\"))?\s*([,;]|$)"
)
"""A `Forwarded` pair and its delimiter (RFC 7239, 4)."""
_WITH_PORT = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<four>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class _Hop:
    """One hop of a forwarding chain: the peer that a proxy saw."""

    node: str
    """An address, optionally with a port; empty or another word if the proxy withholds it."""
    scheme: str = ""


class Proxies:
    """The trusted proxies."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        """`trusted` has addresses, networks and `unix`; raises InvalidSettings for others."""
        names = tuple(trusted)
        self._unix = UNIX in names
        self._networks = [_network(name) for name in names if name != UNIX]
        self._trusts_host = lru_cache(_MOST_HOSTS)(self._is_trusted)

    def __bool__(self) -> bool:
        """Tell whether there are trusted proxies."""
        return self._unix or bool(self._networks)

    def client_of(self, peer: Peer, headers: Headers) -> Peer:
        """Return the peer, or the client behind it if the peer is a trusted proxy.

        The client is the rightmost address in the chain that is not a trusted proxy; it may have
        forged everything to its left. A peer resolved earlier is returned unchanged.
        """
        if peer.proxy or not self._trusts(peer):
            return peer
        values = tuple(map(headers.get, HEADERS))
        known = peer.clients.get(values)
        if known is None:
            known = self._found(peer, values)
            if sum(len(text or "") for text in values) <= _MOST_CHARACTERS:
                if len(peer.clients) >= _MOST_CLIENTS:
                    peer.clients.clear()
                peer.clients[values] = known
        return known

    def _found(self, peer: Peer, values: tuple[str | None, ...]) -> Peer:
        chain, scheme, prefix, forwarded = values
        # Only one of the headers: the other may be the client's own, passed through by the proxy.
        hops = _hops(chain, scheme) if chain is not None else _elements(forwarded or "")
        client, scheme = self._client(peer.address, hops)
        # The socket's user is the proxy's, not the client's.
        return replace(
            peer,
            address=client,
            unix_user=None,
            proxy=peer.address,
            scheme=scheme,
            prefix=_prefix(prefix),
            granted={},
            clients={},
        )

    def _client(self, address: str, hops: list[_Hop]) -> tuple[str, str]:
        """Return the address and scheme of the client, or of the last hop that could be parsed."""
        scheme = ""
        for hop in hops[: -_MOST_HOPS - 1 : -1]:
            found = _address(hop.node)
            if found is None:
                break
            address, scheme = _shown(*found), hop.scheme
            if not self._trusts_host(str(found[0])):
                break
        return address, scheme

    def _trusts(self, peer: Peer) -> bool:
        if peer.address == UNIX:
            return self._unix
        found = _address(peer.address)
        return found is not None and self._trusts_host(str(found[0]))

    def _is_trusted(self, host: str) -> bool:
        address = ip_address(host)
        return any(address in network for network in self._networks)


def came_through_a_proxy(headers: Headers) -> bool:
    """Tell whether a request has a header that only proxies add."""
    return {*map(headers.get, TRACES)} != {None}


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        expected = "an address, a network such as 10.0.0.0/8 without host bits, or unix"
        raise InvalidSettings("trusted_proxy", expected, text) from None


def _address(node: str) -> tuple[Address, str] | None:
    """Parse an address with an optional port; return None for anything else."""
    text, port = node, ""
    with_port = _WITH_PORT.fullmatch(node)
    if with_port is not None:
        text, port = with_port["six"] or with_port["four"], with_port["port"] or ""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address, port


def _shown(address: Address, port: str) -> str:
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{port}" if port else host


def _hops(chain: str, schemes: str | None) -> list[_Hop]:
    """Parse `X-Forwarded-For`, and `X-Forwarded-Proto` if it has as many entries or one for all."""
    nodes = [node.strip() for node in chain.split(",")]
    listed = [text.strip().lower() for text in (schemes or "").split(",")]
    if len(listed) != len(nodes):
        listed = listed[-1:] * len(nodes)
    return [_Hop(node, _scheme(text)) for node, text in zip(nodes, listed, strict=True)]


def _elements(text: str) -> list[_Hop]:
    """Parse `Forwarded` (RFC 7239); a malformed header yields one hop without an address."""
    hops, pairs, at = [], dict[str, str](), 0
    while at <= len(text):
        found = _PAIR.match(text, at)
        if found is None:
            return [_Hop("")]
        name, token, quoted, end = found.groups()
        if name:
            value = token if token is not None else re.sub(r"\\(.)", r"\1", quoted)
            pairs[name.lower()] = value
        at = found.end() if end else len(text) + 1
        if end != ";":
            hops.append(_Hop(pairs.get("for", ""), _scheme(pairs.get("proto", "").lower())))
            pairs = {}
    return hops


def _scheme(text: str) -> str:
    return text if text in _SCHEMES else ""


def _prefix(text: str | None) -> str:
    """Return a path prefix without its trailing slash, or an empty string if it is invalid."""
    last = (text or "").rpartition(",")[2].strip()
    return last.rstrip("/") if _PREFIX.fullmatch(last) else ""
