"""Certificates for 127.0.0.1 that a client must refuse."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """Args:
    is_trusted: by the client
    days: until it expires
    host: that it is for
    """

    what: str
    is_trusted: bool = False
    days: int = 1
    host: str = "127.0.0.1"


def tls_context(certificate: Certificate, place: Path) -> tuple[ssl.SSLContext, Path]:
    """For a server; and the file of the certificates that its client is to trust."""
    cert, another = place / "cert.pem", place / "another.pem"
    _make(cert, certificate.host, certificate.days)
    _make(another, "10.0.0.1", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, cert.with_suffix(".key"))
    return context, cert if certificate.is_trusted else another


def _make(cert: Path, host: str, days: int) -> None:
    """Self-signed, and its key beside it."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    ends = datetime.now(UTC) + timedelta(days=days)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(ends - timedelta(days=10))
        .not_valid_after(ends)
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    cert.write_bytes(made.public_bytes(Encoding.PEM))
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    cert.with_suffix(".key").write_bytes(plain)
