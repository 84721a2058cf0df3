"""Which transports a configuration can have on this machine, and how it is told of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kv_transfer import transport
from kv_transfer.device.base import StreamError
from kv_transfer.nccl import binding
from kv_transfer.settings import KvSettings
from kv_transfer.transport.tcp import TcpTransport
from pdserve.errors import ConfigError
from tests.unit.kv_transfer.caches import Cache, geometry
from tests.unit.kv_transfer.test_device_region import BLOCKS, caches, device_region

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.transport.base import Transport


def test_transports_come_in_the_order_of_the_settings() -> None:
    made = transport.make(KvSettings(transports=("tcp", "shm")))
    assert [one.name for one in made] == ["tcp", "shm"]


@pytest.mark.parametrize("name", sorted(transport.ON_GPU))
def test_a_gpu_transport_without_a_gpu_is_refused_by_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=f"{name} cannot be used here: torch finds no CUDA GPU"
    ) as e:
        transport.make(KvSettings(transports=("tcp", name)))
    assert e.value.field == "kv.transports"


def test_a_gpu_without_nccl_is_refused_by_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.device.cuda.current_device", object)
    settings = KvSettings(transports=("nccl",), nccl_library="/no/such/libnccl.so")
    with pytest.raises(
        ConfigError, match=r"nccl cannot be used here: /no/such/libnccl.so"
    ) as caught:
        transport.make(settings)
    assert caught.value.field == "kv.transports"


def test_a_budget_for_no_communicator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.device.cuda.current_device", object)
    monkeypatch.setattr(binding, "load", lambda configured: object())
    with pytest.raises(ConfigError, match="budget_bytes 1048576: a communicator needs"):
        transport.make(KvSettings(transports=("nccl",), nccl_budget_bytes=1 << 20))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'rdma' is none of shm, tcp"):
        transport.make(KvSettings(transports=("tcp", "rdma")))


def test_what_was_made_is_closed_when_the_next_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Made:
        def close(self) -> None:
            closed.append("first")

    def fails(settings: KvSettings) -> object:
        raise StreamError("no device")

    makers = {"first": lambda settings: Made(), "second": fails}
    monkeypatch.setattr(transport, "_MAKERS", makers)
    with pytest.raises(ConfigError, match="second cannot be used here: no device"):
        transport.make(KvSettings(transports=("first", "second")))
    assert closed == ["first"]


class Named(TcpTransport):
    """By another name."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_auto_takes_what_suits_the_cache_and_leaves_out_what_the_machine_has_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(settings: KvSettings) -> Transport:
        raise StreamError("no library")

    makers: dict[str, Callable[[KvSettings], Transport]] = {
        "shm": lambda settings: Named("shm"),
        "tcp": lambda settings: Named("tcp"),
    }
    monkeypatch.setattr(transport, "_MAKERS", makers)
    assert [x.name for x in transport.make(KvSettings())] == ["shm", "tcp"]
    makers["tcp"] = fails
    assert [x.name for x in transport.make(KvSettings())] == ["shm"]
    assert "tcp cannot be used here: no library; it is not offered" in caplog.text
    makers["shm"] = fails
    with pytest.raises(ConfigError, match=r"shm cannot be .*; kv\.transports: tcp") as caught:
        transport.make(KvSettings())
    assert caught.value.field == "kv.transports"


def test_a_cache_on_a_gpu_needs_a_transport_that_reaches_it_and_slots_that_hold_a_block() -> None:
    region = device_region(caches("LBNHC"), BLOCKS)
    host = transport.make(KvSettings(), on_gpu=False)
    assert [one.name for one in host] == [*transport.ON_HOST]
    with pytest.raises(ConfigError, match="none reaches a KV cache in GPU memory") as caught:
        transport.check(KvSettings(), host, region)
    assert caught.value.field == "kv.transports"
    block = region.geometry.block_bytes
    with pytest.raises(ConfigError, match=f"hold no block of {block}") as caught:
        transport.check(KvSettings(staging_slot_bytes=block - 1), [Named("nccl")], region)
    assert caught.value.field == "kv.staging_slot_bytes"
    transport.check(KvSettings(staging_slot_bytes=block), [*host, Named("nccl")], region)
    transport.check(KvSettings(staging_slot_bytes=1), host, Cache(geometry(), seed=1).region)
