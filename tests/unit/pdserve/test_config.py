"""The configuration refuses what is wrong by its dotted key, and its documents match it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config import (
    Config,
    HttpConfig,
    KvConfig,
    RouterConfig,
    WorkerConfig,
    all_keys,
    current_changes,
    load_config,
    overlay,
    parse,
    read_yaml,
    to_mapping,
)
from pdserve.config.docs import as_markdown, as_yaml
from pdserve.config.load import with_current_names
from pdserve.config.renames import RENAMED
from pdserve.errors import ConfigError
from pdserve.types import Role

# Of an engine over two nodes.
RANK, DP = "data_parallel: {size: 2, group: decode-0}", "data_parallel_size: 2"
TWO, TP = "nodes: {count: 2, address: 10.0.0.1}", "engine_args: {tensor_parallel_size: 2}"
AGGREGATED = "prefill: {workers: 0}, decode: {workers: 0}, aggregated: {workers: 1}"
STAGES_KEY, STAGES = (
    "engine_args.pipeline_parallel_size",
    "engine_args: {pipeline_parallel_size: 2}",
)


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("router: {http: {prot: 1}}", "router.http.prot", "unknown key; keys are host, port"),
        ("routers: {}", "routers", "unknown key; keys are up, router, worker"),
        ("router: {http: {port: 70000}}", "router.http.port", "expected `int` <= 65535"),
        ("router: {http: {shared_port: 8000}}", "router.http.shared_port", "differ from port"),
        ("router: {http: {shared_port: 8001}}", "router.http.shared_port", "differ from grpc.port"),
        ("router: {http: {port: '80'}}", "router.http.port", "expected `int`, got `str`"),
        ("router: {http: {port: true}}", "router.http.port", "expected `int`, got `bool`"),
        ("router: {http: {port: }}", "router.http.port", "got `null`"),
        ("router: {lease_s: .nan}", "router.lease_s", "expected `float` >= 0.1"),
        ("router: {http: {host: ''}}", "router.http.host", "of length >= 1"),
        ("router: {log: {level: loud}}", "router.log.level", "one of debug, info, warning, error"),
        ("router: 3", "router", "expected `object`, got `int`"),
        ("worker: {role: encoder}", "worker.role", "one of prefill, decode, aggregated"),
        ("worker: {kv: {transports: [rdma]}}", "worker.kv.transports[0]", "one of auto, shm, tcp"),
        ("worker: {kv: {connector: nixl}}", "worker.kv.connector", "set transports to [nixl]"),
        ("worker: {kv: {transports: []}}", "worker.kv.transports", "of length >= 1"),
        ("worker: {kv: {transports: [shm, shm]}}", "worker.kv.transports", "duplicate"),
        ("worker: {kv: {transports: shm}}", "worker.kv.transports", "expected `array`"),
        ("worker: {routers: ['h:99999']}", "worker.routers", "host:port"),
        ("worker: {routers: ['dns:8001']}", "worker.routers", "dns:NAME:PORT"),
        ("worker: {routers: ['file:relative:80']}", "worker.routers", "file:/PATH"),
        ("worker: {cores: [-1]}", "worker.cores[0]", ">= 0"),
        ("worker: {cores: [0, 0]}", "worker.cores", "duplicate"),
        ("worker: {engine_args: [1]}", "worker.engine_args", "expected `object`"),
        ("worker: {nodes: {rank: 1}}", "worker.nodes.rank", "must be below count (1), not 1"),
        ("worker: {nodes: {count: 2}}", "worker.nodes.address", "must be set"),
        (f"worker: {{{TWO}, engine_args: {{}}}}", "worker.nodes.count", "size (1), not be 2"),
        (
            f"worker: {{{STAGES}, kv: {{tiers: {{host_gib: 1}}}}}}",
            f"worker.{STAGES_KEY}",
            "kv.tiers",
        ),
        (f"worker: {{{TWO}, {TP}, engine: fake}}", "worker.nodes.count", "with the engine fake"),
        (
            f"worker: {{{TWO}, {TP}, kv: {{tiers: {{host_gib: 1}}}}}}",
            "worker.nodes.count",
            "kv.tiers",
        ),
        ("worker: {data_parallel: {rank: 1}}", "worker.data_parallel.rank", "below size (1)"),
        ("worker: {data_parallel: {size: 2}}", "worker.data_parallel.group", "must be set"),
        (f"worker: {{{RANK}, role: pooling}}", "worker.data_parallel.size", "for pooling"),
        (f"worker: {{{RANK}, {TWO}, {TP}}}", "worker.data_parallel.size", "nodes.count above 1"),
        (f"worker: {{{RANK}, engine: fake}}", "worker.data_parallel.size", "the engine fake"),
        (f"worker: {{{RANK}, {STAGES}}}", f"worker.{STAGES_KEY}", "data_parallel.size above 1"),
        (
            f"worker: {{{RANK}, kv: {{tiers: {{host_gib: 1}}}}}}",
            "worker.data_parallel.size",
            "tiers",
        ),
        ("up: {pooling: {data_parallel_size: 2}}", "up.pooling.data_parallel_size", "must be 1"),
        (f"up: {{decode: {{{DP}, max_workers: 2}}}}", "up.decode.max_workers", "must be 0 with"),
        (
            f"up: {{decode: {{{DP}}}, scaling: {{to_zero_after_s: 9}}}}",
            "up.scaling.to_zero_after_s",
            "start and end as one",
        ),
        (
            f"up: {{{AGGREGATED}, scaling: {{to_zero_after_s: 9}}}}",
            "up.scaling.to_zero_after_s",
            "prefill and decode",
        ),
        (
            f"{{up: {{decode: {{{DP}}}}}, router: {{roles: {{auto: true}}}}}}",
            "router.roles.auto",
            "keep their role",
        ),
        ("up: {decode: {workers: 0}}", "up.decode.workers", "at least 1"),
        ("up: {prefill: {workers: 0}, decode: {workers: 0}}", "up.prefill.workers", "one worker"),
        ("router: {lease_s: 1, lease_s: 2}", "lease_s", "written twice"),
        ("router: {tenants: [{name: a}, {weight: 1}]}", "router.tenants[1].name", "empty"),
        ("router: {tenants: [{name: a, weight: 0}]}", "router.tenants[0].weight", ">= 0.001"),
        ("router: {tenants: [{name: a}, {name: a}]}", "router.tenants", "the same name"),
        ("router: {tenants: [{name: a, keys: [x]}]}", "router.tenants[0].keys[0]", "a hash"),
        ("router: {tenants: [{name: a, color: red}]}", "router.tenants[0].color", "keys are name"),
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
    path.write_text(
        "router: {http: {port: 1, host: h}, lease_s: 7}\nworker: {engine_args: {seed: 3}}\n"
    )
    config = load_config(path, {"router.http.port": 2, "worker.kv.transports": ["tcp"]})
    assert config.router == RouterConfig(http=HttpConfig(port=2, host="h"), lease_s=7.0)
    assert config.worker.kv == KvConfig(transports=("tcp",))
    assert config.worker.engine_args == {"seed": 3}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_accepted_with_a_warning_and_refused_beside_its_new_name(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, found = overlay({}, {old: 7}), overlay({}, {new: 7})
    assert any(f"{key.dotted}.".startswith(f"{new}.") for key in all_keys())
    assert with_current_names(given) == with_current_names(found) == found
    assert current_changes({old: 7}) == current_changes({new: 7}) == {new: 7}
    assert caplog.messages == [f"{old} is now {new}; the next version refuses the old name"] * 2
    with pytest.raises(ConfigError, match=f"{old}: is the old name of {new}, which is set too"):
        current_changes({old: 7, new: 7})
    if not new.startswith(f"{old}."):
        with pytest.raises(ConfigError, match=f"{old}: is the old name"):
            with_current_names(overlay(given, {new: 7}))


def test_old_keys_of_a_file_lie_below_new_ones_of_a_change(tmp_path: Path) -> None:
    path = tmp_path / "pdserve.yaml"
    path.write_text("router: {store: /s, store_files: /f, quotas: {files: 3, batches: 4}}")
    store = load_config(path, current_changes({"router.quotas.files": 5})).router.store
    assert (store.database, store.files) == ("/s", "/f")
    assert (store.quotas.files, store.quotas.batches) == (5, 4)
    assert load_config(None, {"router": {"http_port": 1}}).router.http.port == 1


def test_a_configuration_survives_its_way_through_plain_values() -> None:
    worker = WorkerConfig(
        role=Role.DECODE, cores=(1, 2), kv=KvConfig(transports=("tcp",)), engine_args={"a": [1]}
    )
    assert parse(WorkerConfig, to_mapping(worker)) == worker


def test_the_demo_model_has_a_name_and_a_directory_lends_its_own() -> None:
    assert WorkerConfig().served_names == ("pdserve-demo",)
    assert WorkerConfig(model="/models/llama-8b/").served_names == ("llama-8b",)
    assert WorkerConfig(model="org/llama-8b@v2").served_names == ("org/llama-8b",)
    assert WorkerConfig(model="models/llama-8b.Q4_0.gguf").served_names == ("llama-8b.Q4_0",)
    assert WorkerConfig(model_names=("chat", "gpt")).served_names == ("chat", "gpt")


def test_the_printed_file_is_the_defaults() -> None:
    assert parse(Config, read_yaml(as_yaml(), "printed")) == Config()


def test_the_document_is_what_the_schema_says() -> None:
    path = Path(__file__).parents[3] / "docs" / "configuration.md"
    text = as_markdown()
    assert path.read_text(encoding="utf-8") == text, "run `make docs`"
    assert all(text.count(f'<a id="{key.dotted}">') == 1 for key in all_keys())


def test_every_key_has_a_description() -> None:
    assert [key.dotted for key in all_keys() if not key.description] == []


def test_tenants_are_a_list_of_sections() -> None:
    text = "router: {tenants: [{name: a, weight: 2.5}, {name: b, requests_per_minute: 60}]}"
    config = parse(Config, read_yaml(text, "text"))
    a, b = config.router.tenants
    assert (a.name, a.weight, b.requests_per_minute) == ("a", 2.5, 60.0)
    assert parse(Config, to_mapping(config)) == config


def test_a_key_that_was_written_instead_of_its_hash_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Config, {"router": {"tenants": [{"name": "a", "keys": ["pd-secret"]}]}})
    assert "pd-secret" not in caught.value.message
