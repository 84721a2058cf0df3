"""Who may connect to a process: TLS, roles, and tenants with their API keys and limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.config.fields import Amount, Count, Section, Text, about, refuse
from pdserve.security.keys import is_hash


class HttpTlsConfig(Section, frozen=True):
    """TLS of HTTP. Enabled by `cert_file`."""

    cert_file: Annotated[
        str, about("PEM file: the certificate of this process and its chain. Empty: no TLS.")
    ] = ""
    key_file: Annotated[str, about("PEM file: the private key of `cert_file`, not encrypted.")] = ""
    ca_file: Annotated[
        str,
        about("""PEM file: CAs. If set, clients must present a certificate that one of them
        signed."""),
    ] = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            missing = "key_file" if self.cert_file else "cert_file"
            refuse(missing, "cert_file and key_file must be set together")
        if self.ca_file and not self.cert_file:
            refuse("cert_file", "is required because ca_file is set")


class TlsConfig(HttpTlsConfig, frozen=True):
    """TLS of gRPC and of the links between routers and workers. Enabled by `cert_file`."""

    ca_file: Annotated[
        str, about("PEM file: CAs that sign the certificates of peers. Empty: public CAs.")
    ] = ""
    require_client_cert: Annotated[
        bool,
        about("""With `ca_file`: accept only clients with a certificate that it signed. A URI in
        the certificate gives the role: `urn:pdserve:role:worker`, `...:router` or `...:admin`. A
        caller without one is a client."""),
    ] = True
    peer_name: Annotated[
        str,
        about("""Name in the certificates of peers. Empty: the host that this process connects
        to."""),
    ] = ""

    @property
    def is_mutual(self) -> bool:
        """True if every caller must present a certificate."""
        return bool(self.ca_file) and self.require_client_cert


class AccessConfig(Section, frozen=True):
    """Who may connect to the process, and with which role."""

    require_auth: Annotated[
        bool,
        about("""Refuse to start if an address that other machines can reach accepts
        unauthenticated callers."""),
    ] = False
    tls: TlsConfig = TlsConfig()
    worker_token_file: Annotated[
        str,
        about("""File with a secret that workers and routers share. Use it where certificates do
        not give roles. It may have several secrets, one a line; each is accepted. A changed file
        is read again, and its previous secrets are accepted for ten more minutes."""),
    ] = ""
    admin_keys: Annotated[
        tuple[str, ...],
        about("Hashes of the keys of administrators, as `pdserve config hash-key` prints them."),
    ] = ()
    admin_key_file: Annotated[
        str,
        about("""File with the key of one more administrator, for gRPC only. If nothing else gives
        roles, `pdserve up` generates this file and the worker token, which `admin_keys` need too;
        commands of the same user on this machine find the key by themselves."""),
    ] = ""

    def __post_init__(self) -> None:
        _check_hashes("admin_keys", self.admin_keys)

    @property
    def asks_for_roles(self) -> bool:
        """True if callers of gRPC must authenticate for anything but public requests."""
        return self.tls.is_mutual or bool(self.worker_token_file)


class RouterAccessConfig(AccessConfig, frozen=True):
    """Who may connect to the router, and with which role. API keys of clients are in `tenants`."""

    http_tls: HttpTlsConfig = HttpTlsConfig()
    peer_token_file: Annotated[
        str,
        about("""File with a secret that the routers of all regions share (`router.peers`). A caller
        with it may send requests of any tenant. With several secrets and changes as
        `worker_token_file`."""),
    ] = ""
    open_control: Annotated[
        bool,
        about("""If nothing gives roles: let every caller of the gRPC listener register workers and
        operate the service. Otherwise a router with `tenants` does not start at an address that
        other machines can reach, and `pdserve up` generates credentials."""),
    ] = False

    @property
    def knows_peers(self) -> bool:
        """True if routers of other regions can authenticate."""
        return bool(self.tls.is_mutual or self.peer_token_file)


class TenantConfig(Section, frozen=True):
    """A tenant: its API keys and its limits."""

    name: Annotated[str, about("Name of the tenant in metrics.")] = ""
    keys: Annotated[
        tuple[str, ...], about("Hashes of its API keys, as `pdserve config hash-key` prints them.")
    ] = ()
    weight: Annotated[
        float,
        Meta(ge=0.001, le=1000000.0),
        about("Its share of the service while requests are queued."),
    ] = 1.0
    requests_per_minute: Annotated[Amount, about("Limit of requests per minute. 0: no limit.")] = (
        0.0
    )
    tokens_per_minute: Annotated[
        Amount, about("Limit of tokens per minute, of prompts and expected answers. 0: no limit.")
    ] = 0.0
    max_concurrent_requests: Annotated[
        Count, about("Limit of requests that are queued or running. 0: no limit.")
    ] = 0
    allowed_models: Annotated[
        tuple[Text, ...],
        about("""Models and LoRA adapters that its requests may use, whether they name them or a
        virtual model chooses them. Empty: all."""),
    ] = ()
    allowed_inference_geos: Annotated[
        tuple[Text, ...],
        about("""Regions of `router.residency.regions` where data of its requests may be. Empty:
        all."""),
    ] = ()
    default_inference_geo: Annotated[
        str, about("Region of a request that names none. Empty: any allowed one.")
    ] = ""
    storage_geo: Annotated[
        str,
        about("""Region where its files, batches, responses and idempotent answers, and its KV in
        tiers of workers, may be kept. Empty: any allowed one."""),
    ] = ""

    def __post_init__(self) -> None:
        if not self.name:
            refuse("name", "must not be empty")
        _check_hashes("keys", self.keys)
        allowed, default = self.allowed_inference_geos, self.default_inference_geo
        if allowed and default and default not in allowed:
            refuse("default_inference_geo", "must be one of allowed_inference_geos")


def _check_hashes(key: str, hashes: tuple[str, ...]) -> None:
    for i, text in enumerate(hashes):
        if not is_hash(text):
            # The value may be a key put here by mistake, so it is not repeated.
            refuse(f"{key}[{i}]", "must be a hash that `pdserve config hash-key` printed")
