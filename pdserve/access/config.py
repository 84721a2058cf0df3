"""Configuration keys of access, for router and workers."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.api_keys import is_hash
from pdserve.config_schema import check, key, refuse, section


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS of a process's gRPC, as server and as client. On where `cert_file` is set."""

    cert_file: str = key(
        "", "PEM file with this process's certificate and its chain; empty speaks without TLS."
    )
    key_file: str = key("", "PEM file with the certificate's private key, not encrypted.")
    ca_file: str = key(
        "", "PEM file with the CAs of all others' certificates; empty takes the public ones."
    )
    require_client_cert: bool = key(
        True,
        "Whether, where ca_file is set, only those may connect whose certificate it vouches "
        "for. The URIs in a certificate say what its holder is: `urn:pdserve:role:worker`, "
        "`...:router`, `...:admin`; without any, a client.",
    )
    peer_name: str = key(
        "", "Name that the others' certificates have; empty takes the host that is dialled."
    )

    def __post_init__(self) -> None:
        check(self)
        _check_files(self)

    @property
    def is_mutual(self) -> bool:
        """Whether whoever connects has shown a certificate."""
        return bool(self.ca_file) and self.require_client_cert


@dataclass(frozen=True, slots=True)
class HttpTlsConfig:
    """TLS of the HTTP face. On where `cert_file` is set."""

    cert_file: str = key(
        "", "PEM file with the HTTP face's certificate and its chain; empty speaks without TLS."
    )
    key_file: str = key("", "PEM file with the certificate's private key, not encrypted.")
    ca_file: str = key(
        "", "PEM file with CAs; where it is set, only clients with a certificate of theirs connect."
    )

    def __post_init__(self) -> None:
        check(self)
        _check_files(self)


def _check_files(tls: TlsConfig | HttpTlsConfig) -> None:
    """Raises ConfigError where a file is named without one that it needs."""
    if bool(tls.cert_file) != bool(tls.key_file):
        lacking = "key_file" if tls.cert_file else "cert_file"
        refuse(lacking, "is needed where the other of cert_file and key_file is set")
    if tls.ca_file and not tls.cert_file:
        refuse("cert_file", "is needed where ca_file is set")


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may connect to a process, and as what."""

    require_auth: bool = key(
        False, "Refuse to start where an address that others can reach would be open to all."
    )
    tls: TlsConfig = section(TlsConfig, "TLS of gRPC.")
    worker_token_file: str = key(
        "",
        "File with a secret that workers and routers share, to know each other by; for where "
        "certificates do not say who is who.",
    )
    admin_keys: tuple[str, ...] = key(
        (), "Hashes of the keys, as `pdserve hash-key` makes them, that let people run the service."
    )

    def __post_init__(self) -> None:
        check(self)
        for i, text in enumerate(self.admin_keys):
            if not is_hash(text):
                refuse(f"admin_keys[{i}]", "must be a hash, as `pdserve hash-key` prints it")
        if self.admin_keys and not (self.tls.is_mutual or self.worker_token_file):
            refuse(
                "admin_keys",
                "needs worker_token_file, or tls.ca_file with client certificates: once roles are "
                "asked for, workers need a way to show theirs",
            )

    @property
    def asks_for_roles(self) -> bool:
        """Whether callers must show what they are, to do what is not for everyone."""
        return self.tls.is_mutual or bool(self.worker_token_file) or bool(self.admin_keys)


@dataclass(frozen=True, slots=True)
class RouterAccessConfig(AccessConfig):
    """Those of a router, which has an HTTP face too."""

    http_tls: HttpTlsConfig = section(HttpTlsConfig, "TLS of HTTP.")
