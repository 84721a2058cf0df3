"""What `access.require_auth` demands: nothing that others can reach is open to all."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from pdserve.config_schema import refuse

if TYPE_CHECKING:
    from pdserve.config import RouterConfig, WorkerConfig


def is_exposed(host: str) -> bool:
    """Whether a server at `host` can be reached from other machines; a name may mean anything."""
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def check_router(config: RouterConfig) -> None:
    """Raises ConfigError naming each key to set."""
    access = config.access
    if not access.require_auth:
        return
    lacking: list[str] = []
    hosts = [host for host in (config.http_host, config.grpc_host) if is_exposed(host)]
    if is_exposed(config.http_host):
        if not (config.tenants or access.http_tls.ca_file):
            lacking.append("tenants (API keys)")
        if not access.http_tls.cert_file:
            lacking.append("access.http_tls.cert_file")
    if is_exposed(config.grpc_host):
        tls = access.tls
        if not (config.tenants or tls.is_mutual):
            lacking.append("tenants (API keys)")
        if not tls.cert_file:
            lacking.append("access.tls.cert_file")
        if not (tls.is_mutual or access.worker_token_file):
            lacking.append("access.tls.ca_file or access.worker_token_file (workers)")
        if not (tls.is_mutual or access.admin_keys):
            lacking.append("access.tls.ca_file or access.admin_keys (administrators)")
    _refuse(hosts, lacking)


def check_worker(config: WorkerConfig) -> None:
    """Raises ConfigError naming each key to set."""
    access = config.access
    if not access.require_auth:
        return
    lacking: list[str] = []
    hosts = [host for host in (config.host, config.debug_host) if host and is_exposed(host)]
    routers = [address.rpartition(":")[0] for address in config.routers]
    remote = [host for host in routers if is_exposed(host)]
    if is_exposed(config.host) or remote:
        if not access.tls.cert_file:
            lacking.append("access.tls.cert_file")
        if not (access.tls.is_mutual or access.worker_token_file):
            lacking.append("access.tls.ca_file or access.worker_token_file")
    if config.debug_host and is_exposed(config.debug_host):
        lacking.append("debug_host to loopback, or empty: that face asks nobody who they are")
    if config.kv.connector == "nixl" and is_exposed(config.kv.host):
        hosts.append(config.kv.host)
        lacking.append("kv.connector to pdserve: nixl asks nobody for a right to its memory")
    _refuse([*hosts, *remote], lacking)


def _refuse(hosts: list[str], lacking: list[str]) -> None:
    if lacking:
        where = ", ".join(dict.fromkeys(hosts))
        refuse(
            "access.require_auth",
            f"{where} can be reached by others; set {'; '.join(dict.fromkeys(lacking))}",
        )
