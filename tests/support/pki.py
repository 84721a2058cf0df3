"""Certificates for tests: a CA in memory, and certificates as PEM files in a test's folder."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HOUR = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Ca:
    """A CA whose key is never written to disk. Its certificate is at `path`."""

    def __init__(self, directory: Path, name: str = "ca", *, hours: int = 24) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = (
            _builder(self._name, self._name, self._key, hours)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        file = directory / f"{name}.pem"
        file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        self.path = str(file)

    def issue(
        self, name: str, *, role: str = "", hours: int = 24, dns: tuple[str, ...] = ("localhost",)
    ) -> CertificateFiles:
        """Issue a certificate for loopback and `dns`, for servers and clients. With negative
        `hours` it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.DNSName(x) for x in dns]
        names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        if role:
            names.append(x509.UniformResourceIdentifier(f"urn:pdserve:role:{role}"))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        cert = (
            _builder(subject, self._name, key, hours)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = CertificateFiles(
            str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key")
        )
        Path(files.cert).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        Path(files.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, hours: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 100 * _HOUR)
        .not_valid_after(now + hours * _HOUR)
    )
