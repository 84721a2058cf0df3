"""Credentials of a service that is given none: who gets them, and who can read them."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pdserve.cli import build_parser
from pdserve.cli.options import admin_dialer_from
from pdserve.config import Config, RouterConfig, load_config, overlay, parse
from pdserve.deploy.ray.spec import new_secrets, service_spec, write_process
from pdserve.errors import ConfigError
from pdserve.security import local
from pdserve.security.keys import hash_key
from pdserve.security.roles import Party, make_guard
from router.main import RouterServer

if TYPE_CHECKING:
    from pathlib import Path

OPEN = Config()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_service_gets_credentials_unless_it_has_some_or_wants_none() -> None:
    made = local.new_credentials(OPEN.router.access, OPEN.worker.access)
    assert made.keys() == {"worker_token_file", "admin_key_file"}
    assert made != local.new_credentials(OPEN.router.access, OPEN.worker.access)
    for changes in (
        {"router.access.worker_token_file": "f"},
        {"worker.access.worker_token_file": "f"},
        {"router.access.open_control": True},
    ):
        config = parse(Config, overlay({}, changes))
        assert local.new_credentials(config.router.access, config.worker.access) == {}


def test_what_the_actions_of_the_console_need_is_made_or_shared() -> None:
    hashes = [hash_key("pd-admin")]
    config = parse(Config, overlay({}, {"router.access.admin_keys": hashes}))
    made = local.new_credentials(config.router.access, config.worker.access)
    assert made.keys() == {"worker_token_file", "admin_key_file"}
    with pytest.raises(ConfigError, match=r"access\.admin_keys: needs access\.worker_token_file"):
        make_guard(config.router.access, shared_with=Party.WORKER, host="127.0.0.1")
    one_side = {"router.access.admin_keys": hashes, "router.access.worker_token_file": "/token"}
    access = parse(Config, overlay({}, one_side))
    assert local.new_credentials(access.router.access, access.worker.access) == {}
    shared = local.shared_files(access.router.access, access.worker.access)
    assert shared == {"worker_token_file": "/token"}


def test_only_this_user_can_read_them(tmp_path: Path) -> None:
    (tmp_path / "admin.key").symlink_to(tmp_path / "elsewhere")  # somebody waits for the secret
    files = local.write_credentials(
        tmp_path, {"worker_token_file": "t" * 40, "admin_key_file": "a"}
    )
    assert not (tmp_path / "elsewhere").exists()
    assert {mode(tmp_path / name) for name in ("admin.key", "worker.token")} == {0o600}
    assert files["admin_key_file"] == str(tmp_path / "admin.key")
    assert local.admin_key(tmp_path) == "a"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def key_used(*words: str) -> str:
    return admin_dialer_from(build_parser().parse_args(["status", *words])).token


def test_commands_find_the_key_of_the_router_that_they_operate(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.announce("127.0.0.1:8001", "the-key")
    assert (mode(state / "pdserve"), mode(state / "pdserve/127.0.0.1:8001")) == (0o700, 0o600)
    assert key_used() == key_used("--grpc", "localhost:8001,localhost:8011") == "the-key"
    # It is sent to no other router, and a key that is given goes first.
    assert key_used("--grpc", "127.0.0.1:9001") == ""
    assert key_used("--api-key", "given") == "given"
    # That of the environment may be a tenant's.
    monkeypatch.setenv("PDSERVE_API_KEY", "pd-tenant")
    assert key_used() == "the-key"
    local.withdraw("127.0.0.1:8001")
    local.withdraw("127.0.0.1:8001")
    assert key_used() == "pd-tenant"


def test_a_key_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("pd-key\n")
    assert key_used("--api-key-file", str(tmp_path / "key"), "--grpc", "a:1") == "pd-key"
    with pytest.raises(ConfigError, match="--api-key-file: cannot read"):
        key_used("--api-key-file", str(tmp_path / "none"))
    monkeypatch.setenv("PDSERVE_API_KEY_FILE", str(tmp_path / "key"))
    assert key_used("--grpc", "a:1") == "pd-key"
    assert key_used("--api-key", "given") == "given"


def test_on_ray_secrets_reach_processes_by_private_files(tmp_path: Path) -> None:
    spec = service_spec(OPEN, cpus=1.0, gpus=0, strategy="pack")
    secrets = new_secrets(spec)
    for process in (spec.routers["router-0"], spec.workers["prefill"]):
        words = write_process(tmp_path, process.command, process.section, secrets)
        assert not any(secret in " ".join(words) for secret in secrets.values())
        config = tmp_path / "config.yaml"
        assert mode(config) == 0o600
        access = getattr(load_config(config, {}), process.command).access
        assert make_guard(access, shared_with=Party.WORKER, host="10.0.0.1") is not None
    own = {**spec.workers["prefill"].section, "access": {"worker_token_file": "/own"}}
    write_process(tmp_path, "worker", own, secrets)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["worker"]["access"]["worker_token_file"] == "/own"


TENANTS: list[Any] = [{"name": "t", "keys": [hash_key("t")]}]


async def test_tenants_at_a_reachable_address_need_credentials_of_workers() -> None:
    at = {"http": {"port": 0}, "grpc": {"port": 0, "host": "0.0.0.0"}, "tenants": TENANTS}
    with pytest.raises(ConfigError, match=r"router\.access\.worker_token_file.*open_control"):
        await RouterServer(parse(RouterConfig, at)).start()
    for also in ({"access": {"open_control": True}}, {"grpc": {"port": 0}}):
        server = RouterServer(parse(RouterConfig, {**at, **also}))
        await server.start()
        await server.stop(0.0)
