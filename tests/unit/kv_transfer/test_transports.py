"""Which transports a configuration gets on this machine, and why others are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kv_transfer import transport
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import ON_GPU, ON_HOST, ConnectorConfig
from kv_transfer.vllm.kv_layout import cooperative_kernels
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.protocol.transport import Transport


class Named:
    """A transport that does nothing, and counts its offers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self.offered = 0

    def offer(self, local: LocalKv) -> None:
        self.offered += 1

    def close(self) -> None:
        self.is_closed = True


def test_transports_come_in_the_order_of_the_settings() -> None:
    made = transport.make(ConnectorConfig(transports=("tcp", "shm")))
    assert [one.name for one in made] == ["tcp", "shm"]


def test_nccl_without_a_gpu_is_refused_by_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="nccl cannot be used here: torch finds no CUDA") as e:
        transport.make(ConnectorConfig(transports=("tcp", "nccl")))
    assert e.value.field == "kv.transports"


def test_nccl_is_refused_beside_kernels_that_need_all_their_blocks_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernels(backend: str, size: int = 2) -> str:
        parallel = SimpleNamespace(
            all2all_backend=backend, enable_expert_parallel=True, data_parallel_size=size
        )
        config: Any = SimpleNamespace(parallel_config=parallel)
        return cooperative_kernels(config)

    assert kernels("allgather_reducescatter") == kernels("deepep_low_latency", 1) == ""
    found = kernels("deepep_low_latency")
    makers = {name: lambda _, name=name: Named(name) for name in ON_GPU}  # type: ignore[misc]
    monkeypatch.setattr(transport, "_MAKERS", makers)
    named = ConnectorConfig(transports=("cuda_ipc", "nccl"))
    assert len(transport.make(named, on_gpu=True)) == 2
    with pytest.raises(ConfigError, match="beside all2all_backend deepep_low_latency"):
        transport.make(named, on_gpu=True, cooperative=found)
    made = transport.make(ConnectorConfig(), on_gpu=True, cooperative=found)
    assert [each.name for each in made] == ["cuda_ipc"]
    assert "it is not offered" in caplog.text


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_cannot_be_mapped_elsewhere_is_refused_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transport.nccl.staging.current_gpu", lambda: None)
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ConfigError, match=f"cuda_ipc cannot be used here: {name}"):
        transport.make(ConnectorConfig(transports=("cuda_ipc",)), on_gpu=True)


def test_auto_skips_transports_that_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(settings: ConnectorConfig) -> Transport:
        raise KvTransferError("no library")

    makers: dict[str, Callable[[ConnectorConfig], object]] = {
        name: lambda settings, name=name: Named(name)  # type: ignore[misc]
        for name in ON_HOST
    }
    monkeypatch.setattr(transport, "_MAKERS", makers)
    first, last = ON_HOST[0], ON_HOST[-1]
    assert [x.name for x in transport.make(ConnectorConfig())] == ["shm", "tcp"]
    makers[last] = fails
    assert last not in [x.name for x in transport.make(ConnectorConfig())]
    assert f"{last} cannot be used here: no library; it is not offered" in caplog.text
    makers[first] = fails
    with pytest.raises(ConfigError, match=f"{first} cannot be used here"):
        transport.make(ConnectorConfig())


def test_a_cache_on_a_gpu_needs_a_transport_that_reaches_it() -> None:
    local = LocalKv({0: device_region([torch.zeros(4, 2, 4, 8) for _ in range(3)], 4)}, None)
    with pytest.raises(ConfigError, match="none reaches a KV cache in GPU memory"):
        transport.check(transport.make(ConnectorConfig()), local)
    named = Named("nccl")
    transport.check([named], local)  # type: ignore[list-item]
    assert named.offered == 1  # no step of the engine waits for the export
