"""A certificate authority of the tests' own, and a TLS end in front of any plain server."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Certificate:
    cert_file: Path
    key_file: Path


class Authority:
    """Signs certificates; `ca_file` is its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {folder.name}")])
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        signed = (
            self._builder(self._name, self._key.public_key(), _NOW + _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(identifier, critical=False)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / "ca.crt"
        self.ca_file.write_bytes(signed.public_bytes(_PEM))

    def certificate(self, *names: str, expired: bool = False) -> Certificate:
        """Issues a certificate for these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = [
            x509.IPAddress(ipaddress.ip_address(name)) if name[0].isdigit() else x509.DNSName(name) for name in names
        ]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = (
            self._builder(subject, key.public_key(), _NOW + (-_DAY if expired else _DAY))
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = f"{names[0]}{'-expired' if expired else ''}"
        made = Certificate(self._folder / f"{stem}.crt", self._folder / f"{stem}.key")
        made.cert_file.write_bytes(signed.public_bytes(_PEM))
        plain = serialization.NoEncryption()
        made.key_file.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
        return made

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime
    ) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(
            self._name, subject, key, x509.random_serial_number(), _NOW - 2 * _DAY, until
        )  # fmt: skip


@contextmanager
def tls_before(port: int, certificate: Certificate, clients_ca: Path | None = None) -> Iterator[int]:
    """A port that speaks TLS and passes on to a plain one; asks for a client's certificate with `clients_ca`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert_file, certificate.key_file)
    if clients_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients_ca)

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                outside = stack.enter_context(context.wrap_socket(self.request, server_side=True))
                inside = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                back = threading.Thread(target=_pump, args=(inside, outside), daemon=True)
                back.start()
                _pump(outside, inside)
                back.join()

    with _Listener(("127.0.0.1", 0), Connection) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield listener.server_address[1]
        finally:
            listener.shutdown()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close = True, False


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
