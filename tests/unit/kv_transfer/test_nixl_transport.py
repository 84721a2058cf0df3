"""NIXL's transport: what the conformance tests (test_transfer.py, test_peers.py) do not reach."""

from __future__ import annotations

import ctypes
import multiprocessing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec import structs

from kv_transfer import settings, transport
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.transport import TransportUnavailable
from kv_transfer.settings import ConnectorConfig
from kv_transfer.transport import nixl
from kv_transfer.transport.nixl import Agent, Memory, NixlTransport
from pdserve.errors import ConfigError
from tests.support.kv_caches import HostCache, geometry
from tests.support.kv_pair import FROM, TO, KvWorkers, N, check_exact, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def nixl_workers(clean: None) -> Iterator[KvWorkers]:
    made = KvWorkers(NixlTransport)
    yield made
    made.close()


def test_a_producer_outlives_consumers_that_leave(nixl_workers: KvWorkers) -> None:
    source = nixl_workers.worker()
    for n in range(3):
        target = nixl_workers.worker()
        before, name = target.cache.blocks(), f"t{n}"
        target.start(source, name, TO, N)
        source.prefill(name, FROM, N)
        until(lambda target=target: target.ended, target, source)  # type: ignore[misc]
        check_exact(source, target, before)
        target.close()


class Stuck:
    """NIXL's bindings, with reads that never end. Agents note when they are ended."""

    NIXL_READ, NIXL_IN_PROG, NIXL_SUCCESS = "read", "in progress", "done"
    DRAM_SEG, VRAM_SEG, NIXL_THREAD_SYNC_STRICT = "dram", "vram", "strict"
    nixlAgentConfig = SimpleNamespace  # noqa: N815

    def __init__(self) -> None:
        self.events: list[str] = []
        self.options: dict[str, str] = {}
        self.marks: list[Any] = []

    def nixlRegDList(self, kind: str, ranges: list[Any]) -> list[Any]:  # noqa: N802
        return ranges

    def nixlXferDList(self, kind: str, rows: Any) -> Any:  # noqa: N802
        return rows

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802
        stuck = self

        class Raw:
            def createBackend(self, kind: str, options: dict[str, str]) -> int:  # noqa: N802
                stuck.options = options
                return 1

            def registerMem(self, ranges: list[Any], backends: list[int]) -> None:  # noqa: N802
                pass

            def getLocalMD(self) -> bytes:  # noqa: N802
                return name.encode()

            def loadRemoteMD(self, metadata: bytes) -> bytes:  # noqa: N802
                return metadata

            def createXferReq(self, op: str, to: Any, source: Any, *rest: Any) -> int:  # noqa: N802
                if len(to) == 1 and to[0][1] == nixl._MARK_BYTES:  # the first read ends
                    ctypes.memmove(int(to[0][0]), int(source[0][0]), nixl._MARK_BYTES)
                    return 0
                stuck.events.append("read")
                return 7

            def postXferReq(self, handle: int) -> None:  # noqa: N802
                pass

            def getXferStatus(self, handle: int) -> str:  # noqa: N802
                return Stuck.NIXL_IN_PROG if handle else Stuck.NIXL_SUCCESS

            def releaseXferReq(self, handle: int) -> None:  # noqa: N802
                if handle:
                    stuck.events.append("cancelled")

            def __del__(self) -> None:
                stuck.events.append("agent ended")

        return Raw()


@pytest.mark.parametrize("end", ["deadline", "producer"])
def test_the_agent_of_a_read_that_does_not_end_is_ended_before_the_blocks_are_given_back(
    nixl_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A cancelled read may still write; the end of the agent stops it."""
    stuck = Stuck()
    monkeypatch.setattr(nixl, "load", lambda: stuck)
    source, target = nixl_workers.pair()
    if end == "deadline":
        target.transports[0]._timeout_s = 0.05  # type: ignore[attr-defined]
    real = Consumer.abort_chunk

    def abort(*args: Any) -> Any:
        stuck.events.append("given back")
        return real(*args)

    monkeypatch.setattr(Consumer, "abort_chunk", abort)
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: "read" in stuck.events, target, source)
    if end == "producer":
        source.half.close()
    until(lambda: target.ended, target)
    assert target.failed == ["d-t"]
    until(lambda: "given back" in stuck.events, target)
    order = [stuck.events.index(x) for x in ("read", "cancelled", "agent ended", "given back")]
    assert order == sorted(order)


def test_reads_that_ucx_would_emulate_are_refused(
    nixl_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer would send the bytes, and abort if the consumer is gone."""
    source, target = nixl_workers.pair()
    monkeypatch.setattr(nixl, "_may_read", lambda offer: False)
    target.start(source, "t", TO, N)
    until(lambda: target.ended, target, source)
    assert "neither RDMA nor cross-memory attach reaches" in target.failures["d-t"]


def test_memory_of_another_process_is_read_only_if_it_is_the_producers() -> None:
    memory = Memory(HostCache(geometry(), seed=1).local)
    memory.mark[:] = b"m" * 16
    offer: Any = SimpleNamespace(pid=1, mark=bytes(memory.mark), mark_at=memory.mark_at)
    assert not nixl._may_read(offer)  # a process id of another PID namespace or host
    offer.pid = multiprocessing.current_process().pid
    assert nixl._may_read(offer)
    offer.mark = b"n" * 16
    assert not nixl._may_read(offer)


@pytest.mark.parametrize(
    "wrong", [{"pid": "1"}, {"mark_at": -1}, {"metadata": 5}, {"pages": [[0, 1, 2]]}, {"pages": 3}]
)
def test_a_wrong_offer_is_refused(nixl_workers: KvWorkers, wrong: dict[str, Any]) -> None:
    worker = nixl_workers.worker()
    (made,) = worker.transports
    offer = made.offer(worker.cache.local)
    assert offer is not None
    with pytest.raises(TransportUnavailable, match="the offer is not NIXL's"):
        made.consumer(worker.cache.local, offer | wrong, None)  # type: ignore[arg-type]
    for broken in ({"metadata": b"x"}, {"agent": "another"}, {"mark": b"x" * 16}):
        with pytest.raises(TransportUnavailable):
            made.consumer(worker.cache.local, offer | broken, None)  # type: ignore[arg-type]


def test_auto_uses_nixl_beside_rdma_devices_and_not_where_peers_must_authenticate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    auto = ConnectorConfig()
    assert (auto.names(on_gpu=False), auto.names(on_gpu=True)) == (
        ("shm", "tcp"),
        ("cuda_ipc", "nccl"),
    )
    monkeypatch.setattr(settings, "rdma_devices", lambda: ["uverbs0"])
    assert auto.names(on_gpu=True) == ("cuda_ipc", "nixl", "nccl")
    assert auto.names(on_gpu=False) == ("shm", "nixl", "tcp")
    strict = structs.replace(auto, require_auth=True)
    assert "nixl" not in strict.names(on_gpu=True)


def test_ucx_listens_on_no_interface_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, limits in (([], "NET_DEVICES=lo"), (["uverbs0"], "TLS=^tcp")):
        monkeypatch.setattr(nixl, "rdma_devices", lambda devices=devices: devices)
        stuck = Stuck()
        Agent(stuck, Memory(HostCache(geometry(), seed=1).local), serves=True)
        assert stuck.options["engine_config"] == limits


def test_a_missing_package_is_refused_by_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="nixl cannot be used here: the package nixl is") as e:
        transport.make(ConnectorConfig(transports=("nixl",)))
    assert e.value.field == "kv.transports"


@pytest.mark.parametrize("inside", [True, False])
def test_pages_that_follow_each_other_at_both_ends_are_read_in_one_run(inside: bool) -> None:
    cache = HostCache(geometry(layers_inside=inside), seed=1)
    pages = nixl._Pages.of(cache.region)
    to, source, lengths = nixl.runs(pages, [4, 5, 9], pages, [7, 8, 2])
    page, layers = 64, 3
    assert lengths.tolist() == ([6 * page, 3 * page] if inside else [2 * page, page] * layers)
    read = [ctypes.string_at(int(at), int(n)) for at, n in zip(source, lengths, strict=True)]
    blocks = (7, 8, 2)
    each = [cache.block(b)[n] for b in blocks for n in range(layers)]
    if not inside:
        each = [cache.block(b)[n] for n in range(layers) for b in blocks]
    assert b"".join(read) == b"".join(each)
    assert len(to) == len(lengths)
    with pytest.raises(KvTransferError, match="a block id is not in"):
        nixl.runs(pages, [0], pages, [24])


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC", "BHLNC"])
def test_pages_of_gpu_layouts_are_runs_of_bytes_or_refused(order: str) -> None:
    """On tensors in host memory, with half of the heads."""
    sizes = {"L": 3, "B": 6, "H": 4, "N": 5, "C": 8}
    memory = torch.arange(np.prod(list(sizes.values())), dtype=torch.int64)
    memory = memory.view([sizes[x] for x in order])
    logical = memory.permute([order.index(x) for x in "LBHNC"])
    region = device_region(list(logical), 6)
    found = region.pages_in_memory()
    if order == "BHLNC":
        assert found is None
        return
    half = region.narrowed(range(1, 3), region.geometry.page_bytes // 2, 5 * 8 * 8)
    pages = nixl._Pages.of(region).narrowed(
        range(1, 3), region.geometry.page_bytes // 2, half.geometry.page_bytes
    )
    assert nixl._Pages.of(half).starts([4, 1], by_layer=True).tolist() == (
        pages.starts([4, 1], by_layer=True).tolist()
    )
    read = [ctypes.string_at(int(x), 5 * 8 * 8) for x in pages.starts([4, 1], by_layer=True)]
    want = [logical[layer, b, 2].contiguous().numpy().tobytes() for layer in (1, 2) for b in (4, 1)]
    assert read == want
