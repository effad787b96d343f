"""Clients behind proxies: which addresses are trusted, and which of a chain counts."""

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.serving.call import Peer
from xlaserve.serving.proxies import HEADERS, Proxies

FOR, PROTO, PREFIX, FORWARDED = HEADERS
PROXY, CLIENT = "10.0.0.7", "203.0.113.9"
TRUSTED = ("10.0.0.0/8", "fd00::/8", "unix")


def found(address: str = f"{PROXY}:4000", **headers: str) -> Peer:
    peer = Peer("http_endpoint", address, unix_user=7)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Proxies(TRUSTED).client_of(peer, named)


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        (CLIENT, CLIENT),
        (f"{CLIENT}:81", f"{CLIENT}:81"),
        ("2001:db8::1", "[2001:db8::1]"),
        ("[2001:db8::1]", "[2001:db8::1]"),
        ("[2001:db8::1]:81", "[2001:db8::1]:81"),
        ("::ffff:203.0.113.9", CLIENT),
        (f"127.0.0.1, {CLIENT}", CLIENT),
        (f"127.0.0.1,{CLIENT},10.1.2.3 , fd00::1", CLIENT),
        ("10.9.9.9, 10.1.2.3", "10.9.9.9"),
        (f"{CLIENT}, unknown, 10.1.2.3", "10.1.2.3"),
        (f"{CLIENT}, unknown", f"{PROXY}:4000"),
        (f"{CLIENT}, 10.1.2.3.4", f"{PROXY}:4000"),
        (f"{CLIENT}, _hidden", f"{PROXY}:4000"),
        (f"{CLIENT},", f"{PROXY}:4000"),
        ("", f"{PROXY}:4000"),
        (", ".join([CLIENT, *["10.1.2.3"] * 40]), "10.1.2.3"),
    ],
)
def test_a_chain_is_read_from_the_right(chain: str, client: str) -> None:
    peer = found(x_forwarded_for=chain)

    assert (client, f"{PROXY}:4000", None) == (peer.address, peer.proxy, peer.unix_user)


@pytest.mark.parametrize(
    ("text", "client", "scheme"),
    [
        (f"for={CLIENT}", CLIENT, ""),
        (f"For={CLIENT};proto=HTTPS", CLIENT, "https"),
        (f'for="{CLIENT}:81"', f"{CLIENT}:81", ""),
        ('for="[2001:db8::1]:81";host="a,b;c"', "[2001:db8::1]:81", ""),
        (f"for=127.0.0.1;proto=http, for={CLIENT};proto=https, for=10.1.2.3", CLIENT, "https"),
        (f'for={CLIENT};by="a\\"b, for=1.2.3.4"', CLIENT, ""),
        (f"for={CLIENT};proto=ftp", CLIENT, ""),
        (f"for={CLIENT}, proto=https", f"{PROXY}:4000", ""),
        (f"for={CLIENT}, for=unknown", f"{PROXY}:4000", ""),
        (f'for="{CLIENT}', f"{PROXY}:4000", ""),
        (f"for={CLIENT}, =", f"{PROXY}:4000", ""),
        ("", f"{PROXY}:4000", ""),
    ],
)
def test_forwarded_is_read_as_its_grammar_says(text: str, client: str, scheme: str) -> None:
    peer = found(forwarded=text)

    assert (client, scheme) == (peer.address, peer.scheme)


def test_one_chain_is_believed_where_there_are_two() -> None:
    """A proxy that writes one of the headers may pass on the other as its client sent it."""
    peer = found(x_forwarded_for=CLIENT, forwarded="for=198.51.100.1;proto=https")

    assert (CLIENT, "") == (peer.address, peer.scheme)


@pytest.mark.parametrize(
    ("chain", "told", "scheme"),
    [
        (CLIENT, "https", "https"),
        (CLIENT, "HTTP", "http"),
        (CLIENT, "http, https", "https"),
        (f"{CLIENT}, 10.1.2.3", "https, http", "https"),
        (f"1.1.1.1, {CLIENT}", "http, https", "https"),
        (CLIENT, "javascript", ""),
        (CLIENT, "", ""),
    ],
)
def test_the_scheme_is_the_one_of_the_client(chain: str, told: str, scheme: str) -> None:
    assert scheme == found(x_forwarded_for=chain, x_forwarded_proto=told).scheme


@pytest.mark.parametrize(
    ("told", "prefix"),
    [
        ("/ml", "/ml"),
        ("/ml/", "/ml"),
        ("/a/b-1", "/a/b-1"),
        ("/forged, /ml", "/ml"),
        ("//evil.example", ""),
        ("/a//b", ""),
        ("ml", ""),
        ("/", ""),
        ("https://evil.example", ""),
        ("/a b", ""),
        ('/a"b', ""),
    ],
)
def test_a_prefix_is_a_path_and_no_other_server(told: str, prefix: str) -> None:
    assert prefix == found(x_forwarded_for=CLIENT, x_forwarded_prefix=told).prefix


@pytest.mark.parametrize("address", ["11.0.0.7:1", "[2001:db8::1]:1", "", "127.0.0.1:1"])
def test_nobody_else_is_believed(address: str) -> None:
    said = {"x_forwarded_for": CLIENT, "forwarded": f"for={CLIENT}", "x_forwarded_prefix": "/ml"}

    assert Peer("http_endpoint", address, unix_user=7) == found(address, **said)


@pytest.mark.parametrize("address", [f"{PROXY}:1", "[fd00::1]:1", "[::ffff:10.0.0.7]:1", "unix"])
def test_proxies_are_known_by_address_network_and_socket(address: str) -> None:
    assert CLIENT == found(address, x_forwarded_for=CLIENT).address


def test_only_a_trusted_socket_is_believed() -> None:
    peer = Peer("http_endpoint", "unix", unix_user=7)

    assert peer is Proxies(["10.0.0.0/8"]).client_of(peer, {FOR: CLIENT})


def test_a_client_is_the_same_one_each_time_and_no_other() -> None:
    """Cached data, such as permissions, must never apply to another client."""
    proxies, peer = Proxies(TRUSTED), Peer("http_endpoint", f"{PROXY}:1")
    clients = [proxies.client_of(peer, {FOR: f"203.0.113.{n % 100}"}) for n in range(200)]
    again = proxies.client_of(peer, {FOR: "203.0.113.99"})
    long = [proxies.client_of(peer, {FOR: f"{'1' * 2000}, {CLIENT}"}) for _ in range(2)]

    assert [f"203.0.113.{n % 100}" for n in range(200)] == [one.address for one in clients]
    assert again is clients[-1]
    assert again is proxies.client_of(again, {FOR: "198.51.100.1"})
    assert long[0] is not long[1]
    assert len({id(one.granted) for one in clients[:60]}) == 60
    assert len(peer.clients) <= 64


@pytest.mark.parametrize("text", ["10.0.0.7/8", "proxy.example", "", "UNIX", "10.0.0.0/33"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidSettings, match="trusted_proxy: expected an address, a network"):
        Proxies([text])
