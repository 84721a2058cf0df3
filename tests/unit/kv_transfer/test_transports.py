"""Which transports a configuration gets on this machine, and why others are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kv_transfer import transport
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import ON_HOST, ConnectorConfig
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.protocol.transport import Transport


class Named:
    """Return a transport that has only a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

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
    assert [x.name for x in transport.make(ConnectorConfig())] == [*ON_HOST]
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
    transport.check([Named("nccl")], local)  # type: ignore[list-item]
