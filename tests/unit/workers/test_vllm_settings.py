"""What a vLLM engine is given, as far as it can be said without vLLM."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.settings import SLOT_BYTES, SLOTS, ConnectorConfig
from pdserve.config import AccessConfig, KvConfig, TiersConfig, TlsConfig, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.process.memory import LARGEST_CACHE, cpu_cache_bytes
from pdserve.types import Role
from workers.make_engine import vllm_settings
from workers.vllm.start.settings import _choose_nccl_interface, memory_left_to_kv

if TYPE_CHECKING:
    from pathlib import Path

HELD = 4 * (16 << 20) + 2 * SLOTS * SLOT_BYTES + 100  # scratch, slots, communicators
KV = ConnectorConfig(transports=("nccl",), nccl_budget_bytes=100)


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ({}, {"gpu_memory_utilization": pytest.approx(0.6)}),
        ({"gpu_memory_utilization": 0.45}, {"gpu_memory_utilization": pytest.approx(0.15)}),
        ({"kv_cache_memory_bytes": 1}, {}),
    ],
)
def test_memory_of_transports_is_not_given_to_the_kv_cache(
    args: dict[str, object], left: dict[str, float]
) -> None:
    assert memory_left_to_kv(KV, args, HELD * 10 // 3, 0.9) == left


def test_transports_that_leave_nothing_to_the_kv_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bytes, which are more than 0\.90 of a GPU"):
        memory_left_to_kv(KV, {}, HELD, 0.9)


@pytest.mark.parametrize(
    ("host", "before", "after"),
    [("127.0.0.1", None, None), ("10.9.8.7", None, "ib0"), ("10.9.8.7", "eth1", "eth1")],
)
def test_nccl_joins_over_the_network_of_the_kv_links(
    host: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with several networks, it would take the first one."""
    name = "NCCL_SOCKET_IFNAME"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    if before is not None:
        monkeypatch.setenv(name, before)
    addresses = {"eth0": [SimpleNamespace(address="10.0.0.1")]}
    addresses["ib0"] = [SimpleNamespace(address="10.9.8.7")]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    settings: Any = SimpleNamespace(kv=SimpleNamespace(host=host))
    _choose_nccl_interface(settings)
    assert os.environ.get(name) == after


def test_a_cpu_cache_is_a_share_of_the_memory_and_no_more_than_contexts_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
    shape |= {"hidden_size": 1024, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert LARGEST_CACHE < 16 * (2 * 2 * 16 * 4 * 64 * 8192)
    for memory, threads, wanted in (
        (1 << 40, 4, LARGEST_CACHE),
        (2 << 30, 2, int((2 << 30) * 0.25 * 0.5)),
        (2 << 30, None, int((2 << 30) * 0.25)),
        (64 << 20, 1, 64 << 20),
    ):
        monkeypatch.setattr("pdserve.process.memory.memory_bytes", lambda memory=memory: memory)
        assert cpu_cache_bytes(str(tmp_path), threads) == wanted


def test_kv_links_are_authenticated_as_the_worker_is() -> None:
    """The configuration names files, because it may be logged."""
    tls = TlsConfig(cert_file="worker.pem", key_file="worker.key", ca_file="ca.pem")
    access = AccessConfig(tls=tls, worker_token_file="token")
    settings = vllm_settings(WorkerConfig(role=Role.PREFILL, access=access)).kv
    assert settings is not None
    assert settings.token_file == "token"
    files = (settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file)
    assert files == ("worker.pem", "worker.key", "ca.pem")
    open_to_all = vllm_settings(WorkerConfig(role=Role.PREFILL)).kv
    assert open_to_all is not None
    assert (open_to_all.token_file, open_to_all.tls_cert_file) == ("", "")


def test_the_kv_plane_has_the_keys_of_the_worker_and_tiers_are_apart() -> None:
    keys: dict[str, Any] = {"hold_s": 7.0, "transports": ("tcp",), "chunk_bytes": 1 << 20}
    keys |= {"nccl_max_ctas": 8, "nccl_budget_bytes": 1 << 30, "receive_timeout_s": 9.0}
    keys |= {"handshake_timeout_s": 3.0, "send_timeout_s": 4.0, "preempt_timeout_s": 5.0}
    kv = KvConfig(**keys, tiers=TiersConfig(host_gib=1.0))
    settings = vllm_settings(WorkerConfig(role=Role.PREFILL, kv=kv), "instance")
    assert settings.kv == ConnectorConfig(**keys)
    assert (settings.tiers.host_gib, settings.instance_id) == (1.0, "instance")
    assert vllm_settings(WorkerConfig(kv=kv), "instance").kv is None


def test_what_depends_on_the_model_is_left_to_vllm_for_pooling() -> None:
    """A model that embeds may need the whole prompt in one step, and more tokens a step for it."""
    made = vllm_settings(WorkerConfig(role=Role.POOLING, model="m", engine_args={"seed": 1}))
    left = ("enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens")
    assert made.engine_args == {**dict.fromkeys(left), "seed": 1, "runner": "pooling"}
