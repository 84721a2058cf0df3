"""`access.require_auth`: what is open to all is refused, with the keys that would close it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.cli import build_parser
from pdserve.cli.options import config_from
from pdserve.config import Config, is_exposed, overlay, parse
from pdserve.deploy.local.specs import worker_configs
from pdserve.errors import ConfigError
from pdserve.security.keys import hash_key

TLS = {"cert_file": "c", "key_file": "k"}
TENANTS = [{"name": "t", "keys": [hash_key("t")]}]
CLOSED_ROUTER: dict[str, Any] = {
    "router.tenants": TENANTS,
    "router.access": {"require_auth": True, "tls": {**TLS, "ca_file": "a"}, "http_tls": TLS},
    "router.http.host": "0.0.0.0",
    "router.grpc.host": "::",
}
CLOSED_WORKER: dict[str, Any] = {
    "worker.access": {"require_auth": True, "tls": {**TLS, "ca_file": "a"}},
    "worker.host": "10.0.0.2",
    "worker.routers": ["router.example:8001"],
}


def made(**changes: Any) -> Config:
    return parse(Config, overlay({}, changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(**changes)
    assert caught.value.field.endswith("access.require_auth")
    return caught.value.message


def test_networks_expose_only_permitted_ports() -> None:
    assert not any(map(is_exposed, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert all(map(is_exposed, ("0.0.0.0", "::", "10.0.0.1", "some.host")))


def test_only_loopback_may_be_open_without_credentials() -> None:
    made(**{"router.access.require_auth": True, "worker.access.require_auth": True})
    made(**CLOSED_ROUTER)
    made(**CLOSED_WORKER)
    token = {"require_auth": True, "tls": TLS, "http_tls": TLS, "worker_token_file": "f"}
    keys = {"admin_keys": [hash_key("a")]}
    made(**{**CLOSED_ROUTER, "router.access": {**token, **keys}})
    # Without the demand everything may be open, as it always could.
    made(**{"router.http.host": "0.0.0.0", "router.grpc.host": "0.0.0.0"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"router.access": {"require_auth": True}}, "access.http_tls.cert_file; access.tls"),
        ({"router.access": {"require_auth": True, "http_tls": TLS}}, "access.tls.cert_file"),
        (
            {"router.access": {"require_auth": True, "http_tls": TLS, "tls": TLS}},
            "worker_token_file (workers); access.tls.ca_file or access.admin_keys (admin",
        ),
        ({"router.tenants": []}, "set tenants (API keys)"),
    ],
)
def test_an_open_router_is_refused(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**{**CLOSED_ROUTER, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"worker.access": {"require_auth": True}}, "access.tls.cert_file"),
        (
            {"worker.access": {"require_auth": True, "tls": TLS}},
            "access.tls.ca_file or access.worker_token_file",
        ),
        ({"worker.debug.host": "0.0.0.0"}, "debug.host"),
        ({"worker.kv": {"transports": ["nixl"], "host": "10.0.0.2"}}, "without nixl"),
        ({"worker.host": "127.0.0.1", "worker.access": {"require_auth": True}}, "router.example"),
    ],
)
def test_an_open_worker_is_refused(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**{**CLOSED_WORKER, **changes})


def test_the_option_is_the_key_and_a_stack_is_as_strict_as_its_router() -> None:
    for name in ("router", "up"):
        open_, strict = (
            config_from(build_parser().parse_args([name, *options]))
            for options in ([], ["--require-auth"])
        )
        assert not open_.router.access.require_auth
        assert strict.router.access.require_auth
        workers = worker_configs(strict, {0, 1})
        assert all(worker.access.require_auth for worker in workers.values())
