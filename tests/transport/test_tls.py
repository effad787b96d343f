"""TLS contexts of listeners: what they refuse, and how they reload their files."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.tls import write_certificate

from xlaserve.errors import InvalidSettings
from xlaserve.net.tls import ServerTls, server_tls
from xlaserve.settings import Settings
from xlaserve.settings.choices import TlsEndpoint

SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The CA that signs the certificates."""
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, Any]:
    """Settings of a server that asks clients for certificates."""
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(authority.cert_pem.bytes())
    return {**write_certificate(authority, tmp_path), "tls_client_ca": str(authorities)}


def contexts(tmp_path: Path, **settings: Any) -> ServerTls:
    found = server_tls(Settings(repository=tmp_path, **settings))
    assert found is not None
    found.reload()
    return found


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLSocket:
    """Perform a handshake; return the client's side. Raises the client's error."""
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(far, server_side=True) as side:
                side.recv(1)
        except OSError:
            far.close()

    thread = Thread(target=serve)
    thread.start()
    try:
        side = client.wrap_socket(near, server_hostname="localhost")
        side.send(b"x")
        side.close()
        return side
    finally:
        near.close()
        thread.join()


def trusting(authority: trustme.CA, *, alpn: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("client.example").configure_cert(context)
    if alpn:
        context.set_alpn_protocols([alpn])
    return context


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("content", ["nothing", "", None])
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, files: dict[str, Any], setting: str, content: str | None
) -> None:
    broken = tmp_path / "broken.pem"
    if content is not None:
        broken.write_text(content)
    named = "tls_client_ca" if setting == "tls_client_ca" else "tls_certificate"

    with pytest.raises(InvalidSettings, match=f"setting {named}: expected"):
        contexts(tmp_path, **files | {setting: str(broken)})


def test_a_key_that_needs_a_password_is_an_error_and_no_question(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    """A password prompt on the terminal would block the server forever."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key = serialization.load_pem_private_key(Path(files["tls_key"]).read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    Path(files["tls_key"]).write_bytes(locked)

    with pytest.raises(InvalidSettings, match="setting tls_key: expected a key without a password"):
        contexts(tmp_path, **files)


@pytest.mark.parametrize("name", ["tls_key", "tls_client_ca"])
def test_a_key_needs_its_certificate(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {name: "key.pem"}
    with pytest.raises(InvalidSettings, match=f"tls_certificate: expected a file, since {name}"):
        server_tls(Settings(repository=tmp_path, **settings))


def test_a_certificate_for_no_endpoint_is_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match="tls_endpoints"):
        contexts(tmp_path, **files, tls_endpoints=())


def test_endpoints_that_are_not_named_are_in_the_clear(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    tls = contexts(tmp_path, **files, tls_endpoints=(TlsEndpoint.GRPC,))

    assert tls.of(TlsEndpoint.GRPC) is not None
    assert tls.of(TlsEndpoint.HTTP) is tls.of(TlsEndpoint.METRICS) is None


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        (TlsEndpoint.GRPC, "h2"),
        (TlsEndpoint.HTTP, "http/1.1"),
        (TlsEndpoint.METRICS, "http/1.1"),
    ],
)
def test_each_endpoint_agrees_on_its_protocol(
    tmp_path: Path,
    files: dict[str, Any],
    authority: trustme.CA,
    endpoint: TlsEndpoint,
    protocol: str,
) -> None:
    make = contexts(tmp_path, **files).of(endpoint)
    assert make is not None
    offering = trusting(authority)
    offering.set_alpn_protocols(["h2", "http/1.1"])
    near, far = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = offering.wrap_bio(near, far, server_hostname="localhost")
    server = make().wrap_bio(far, near, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue

    assert protocol == client.selected_alpn_protocol() == server.selected_alpn_protocol()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_are_refused(
    tmp_path: Path, files: dict[str, Any], authority: trustme.CA, version: ssl.TLSVersion
) -> None:
    make = contexts(tmp_path, **files).of(TlsEndpoint.HTTP)
    assert make is not None
    client = trusting(authority)
    # Otherwise the client's own library refuses.
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = client.maximum_version = version

    assert ssl.TLSVersion.TLSv1_2 == make().minimum_version
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(make(), client)


def test_no_cipher_of_an_endpoint_is_of_cbc(tmp_path: Path, files: dict[str, Any]) -> None:
    """All ciphers are authenticated and forward secret: no RSA key exchange."""
    make = contexts(tmp_path, **files).of(TlsEndpoint.GRPC)
    assert make is not None
    ciphers = make().get_ciphers()

    assert ciphers
    assert all(cipher["aead"] for cipher in ciphers)
    assert all(cipher["name"].startswith(("TLS_", "ECDHE-")) for cipher in ciphers)


def test_a_client_that_knows_cbc_only_is_refused(
    tmp_path: Path, files: dict[str, Any], authority: trustme.CA
) -> None:
    make = contexts(tmp_path, **files).of(TlsEndpoint.HTTP)
    assert make is not None
    client = trusting(authority)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake(make(), client).cipher() is None  # it is closed, and was accepted
    client.set_ciphers("ECDHE-ECDSA-AES256-SHA384:ECDHE-RSA-AES256-SHA384")

    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(make(), client)


def test_sessions_of_clients_with_certificates_are_not_resumed(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    """A resumed session shows no certificate, and would outlive an expired one."""
    make = contexts(tmp_path, **files).of(TlsEndpoint.HTTP)
    assert make is not None

    assert 0 == make().num_tickets
    assert make().options & ssl.OP_NO_TICKET
    assert make().options & ssl.OP_NO_RENEGOTIATION


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_broken_new_file_keeps_the_old_ones(
    tmp_path: Path, files: dict[str, Any], authority: trustme.CA, setting: str
) -> None:
    """Also a key that does not match its certificate, between the two writes of a renewal."""
    tls = contexts(tmp_path, **files)
    before = {endpoint: tls.of(endpoint) for endpoint in TlsEndpoint}
    made = {endpoint: make() for endpoint, make in before.items() if make}
    garbage = {"tls_key": authority.issue_cert("localhost").private_key_pem.bytes()}
    path = Path(files[setting])
    whole = path.read_bytes()
    path.write_bytes(garbage.get(setting, b"garbage"))
    with pytest.raises(InvalidSettings):
        tls.reload()

    assert made == {endpoint: make() for endpoint, make in before.items() if make}
    shake(made[TlsEndpoint.HTTP], trusting(authority))

    path.write_bytes(whole)
    tls.reload()

    assert all(make() is not made[endpoint] for endpoint, make in before.items() if make)


@pytest.mark.parametrize("together", [False, True])
def test_a_key_with_a_password_is_named_and_what_to_do(tmp_path: Path, together: bool) -> None:
    """The key may have its own file, or be in the certificate file."""
    key = ec.generate_private_key(ec.SECP256R1())
    secret = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, secret)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now).not_valid_after(now + timedelta(days=1))
    chain = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    certificate, own = tmp_path / "chain.pem", tmp_path / "key.pem"
    certificate.write_bytes(chain + (pem if together else b""))
    own.write_bytes(pem)
    files = {"tls_certificate": str(certificate)} | ({} if together else {"tls_key": str(own)})
    setting = "tls_certificate" if together else "tls_key"
    settings = Settings.read({}, repository=tmp_path, **files)
    tls = server_tls(settings)
    assert tls is not None

    with pytest.raises(InvalidSettings) as refused:
        tls.reload()
    text = str(refused.value)
    assert f"setting {setting}: " in text
    assert str(certificate if together else own) in text
    assert "openssl pkey" in text
