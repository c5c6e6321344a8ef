"""TLS on the way to Redis and the store: always verified, and what is wrong with it said in words."""

import re
import socket
import ssl
from pathlib import Path

_PROBE_SECONDS = 2.0
_CAUSES = (
    ("certificate has expired", "its certificate has expired; renew it there, or set this machine's clock right"),
    ("not yet valid", "its certificate is not valid yet; set this machine's clock right"),
    ("mismatch|doesn't match",
     "its certificate is for another name ({said}); use the name that it is for in {section}.{url}, or give it one "
     "for this name"),
    ("CERTIFICATE_VERIFY_FAILED",
     "no authority that this machine knows has signed its certificate ({said}); name the certificate of yours in "
     "{section}.ca_file"),
    ("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|UNKNOWN_PROTOCOL",
     "it does not speak TLS; turn TLS on there, or begin {section}.{url} with {plain}:// on a network of your own"),
    ("EOF occurred in violation|CERTIFICATE_REQUIRED|HANDSHAKE_FAILURE",
     "it ends the TLS handshake; if it asks for a client's certificate, name ours in {section}.cert_file and key_file"),
)  # fmt: skip
_SAID = re.compile(r"(?:certificate verify failed: |hostname )(.*?)\.?(?: \(_ssl|$)")
_URLS = {"redis": ("url", "redis"), "store": ("endpoint_url", "http")}


def check_files(
    section: str, ca_file: Path | None, cert_file: Path | None = None, key_file: Path | None = None
) -> None:
    """Raises `ValueError` where this machine has no such certificates."""
    context = ssl.create_default_context()
    wrong = f"ca_file={ca_file} holds no certificate (PEM)"
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        wrong = f"cert_file={cert_file} and key_file={key_file} hold no certificate and its key"
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ValueError(f"{section}.{wrong} on this machine: {error.strerror or error}") from None


def cause(said: str, section: str) -> str | None:
    """Returns the defect and the remedy behind OpenSSL's text about Redis (`redis`) or the store; None if unknown."""
    words, (url, plain) = _SAID.search(said), _URLS[section]
    for pattern, text in _CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            return text.format(section=section, url=url, plain=plain, said=words.group(1) if words else "not verified")
    return None


def speaks_tls(host: str, port: int) -> bool:
    """Returns whether the server completes a TLS handshake; its certificate is not verified."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECONDS) as raw, context.wrap_socket(raw):
            return True
    except OSError:
        return False


def speaks_plain_redis(host: str, port: int) -> bool:
    """Returns whether the server answers a PING without TLS."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECONDS) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(64)[:1] in {b"+", b"-"}
    except OSError:
        return False
