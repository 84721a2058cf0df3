"""The configuration refuses what is wrong by its dotted key, and its documents match it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config import Config, KvConfig, RouterConfig, WorkerConfig, load_config
from pdserve.config_docs import DOC_PATH, as_markdown, as_yaml
from pdserve.config_schema import parse, read_yaml, to_mapping
from pdserve.errors import ConfigError
from pdserve.types import Role

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("router: {http_prot: 1}", "router.http_prot", "is not a key here"),
        ("routers: {}", "routers", "is not a key here"),
        ("router: {http_port: 70000}", "router.http_port", "at most 65535"),
        ("router: {shared_http_port: 8001}", "router.shared_http_port", "must be another"),
        ("router: {http_port: '80'}", "router.http_port", "must be an integer"),
        ("router: {http_port: true}", "router.http_port", "must be an integer"),
        ("router: {http_port: }", "router.http_port", "not empty"),
        ("router: {lease_s: 0}", "router.lease_s", "at least 0.1"),
        ("router: {lease_s: .nan}", "router.lease_s", "at least 0.1"),
        ("router: {http_host: ''}", "router.http_host", "must not be empty"),
        ("router: {log_level: loud}", "router.log_level", "one of debug"),
        ("router: 3", "router", "must be a mapping"),
        ("worker: {role: encode}", "worker.role", "one of prefill, decode, aggregated"),
        (
            "worker: {kv: {transports: [rdma]}}",
            "worker.kv.transports",
            "one of auto, shm, tcp",
        ),
        ("worker: {kv: {transports: []}}", "worker.kv.transports", "must not be empty"),
        ("worker: {kv: {transports: [shm, shm]}}", "worker.kv.transports", "twice"),
        ("worker: {kv: {transports: shm}}", "worker.kv.transports", "must be a list"),
        ("worker: {kv: {transports: [1]}}", "worker.kv.transports[0]", "must be a string"),
        ("worker: {kv: {staging_slots: 1}}", "worker.kv.staging_slots", "at least 2"),
        ("worker: {kv: {nccl_max_ctas: 33}}", "worker.kv.nccl_max_ctas", "at most 32"),
        ("worker: {kv: {nccl_budget_bytes: 0}}", "worker.kv.nccl_budget_bytes", "at least 1"),
        ("worker: {kv: {nccl_library: 3}}", "worker.kv.nccl_library", "must be a string"),
        ("worker: {routers: [localhost]}", "worker.routers", "host:port"),
        ("worker: {routers: ['h:99999']}", "worker.routers", "host:port"),
        ("worker: {cores: [-1]}", "worker.cores", "at least 0"),
        ("worker: {cores: [0, 0]}", "worker.cores", "twice"),
        ("worker: {engine_args: [1]}", "worker.engine_args", "must be a mapping"),
        ("worker: {engine_args: {1: 2}}", "worker.engine_args", "not a string"),
        ("up: {decode: 0}", "up.decode", "at least 1"),
        ("up: {prefill: 0}", "up.prefill", "at least 1"),
        ("up: {prefill: 0, decode: 0}", "up.prefill", "no worker"),
        ("router: {http_port: 1, http_port: 2}", "http_port", "written twice"),
    ],
)
def test_refusals_name_the_dotted_key_and_the_reason(text: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Config, read_yaml(text, "test"))
    assert caught.value.field == key
    assert reason in caught.value.message
    assert key in caught.value.message


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", "\t- x", "{[1]: 2}"])
def test_text_that_holds_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_yaml(text, "test")


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml", {})


def test_changes_lie_over_the_file_and_leave_its_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "pdserve.yaml"
    path.write_text("router: {http_port: 1, lease_s: 7}\nworker: {engine_args: {seed: 3}}\n")
    config = load_config(path, {"router.http_port": 2, "worker.kv.transports": ["tcp"]})
    assert config.router == RouterConfig(http_port=2, lease_s=7.0)
    assert config.worker.kv == KvConfig(transports=("tcp",))
    assert config.worker.engine_args == {"seed": 3}


def test_a_configuration_survives_its_way_through_plain_values() -> None:
    worker = WorkerConfig(
        role=Role.DECODE, cores=(1, 2), kv=KvConfig(transports=("tcp",)), engine_args={"a": [1]}
    )
    assert parse(WorkerConfig, to_mapping(worker)) == worker


def test_values_made_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="max_body_bytes"):
        RouterConfig(max_body_bytes=0)


def test_the_demo_model_has_a_name_and_a_directory_lends_its_own() -> None:
    assert WorkerConfig().served_model_name == "pdserve-demo"
    assert WorkerConfig(model="/models/llama-8b/").served_model_name == "llama-8b"
    assert WorkerConfig(model_name="chat").served_model_name == "chat"


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        _ = WorkerConfig(model=str(tmp_path)).model_path


def test_the_printed_file_is_the_defaults() -> None:
    assert parse(Config, read_yaml(as_yaml(), "printed")) == Config()


def test_the_document_is_what_the_schema_says() -> None:
    assert DOC_PATH.read_text(encoding="utf-8") == as_markdown(), (
        "docs/configuration.md is behind: run `make docs`"
    )


TENANT = """
router:
  tenants:
    - {name: a, weight: 2.5, keys: ["sha256:%s"]}
    - {name: b, requests_per_minute: 60}
""" % ("ab" * 32)


def test_tenants_are_a_list_of_sections() -> None:
    config = parse(Config, read_yaml(TENANT, "text"))
    a, b = config.router.tenants
    assert (a.name, a.weight, len(a.keys), b.requests_per_minute) == ("a", 2.5, 1, 60.0)
    assert parse(Config, to_mapping(config)) == config
    assert "`router.tenants[].max_concurrent_requests`" in as_markdown()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[{name: a}, {weight: 1}]", "router.tenants[1].name"),
        ("[{name: a, weight: 0}]", "router.tenants[0].weight"),
        ("[{name: a}, {name: a}]", "router.tenants"),
        ("[{name: a, keys: [secret]}]", "router.tenants[0].keys[0]"),
        ("[{name: a, color: red}]", "router.tenants[0].color"),
        ("[a]", "router.tenants[0]"),
    ],
)
def test_a_tenant_that_is_wrong_is_refused_by_its_place(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Config, read_yaml(f"router: {{tenants: {text}}}", "text"))
    assert caught.value.field == field
    assert "secret" not in str(caught.value)
