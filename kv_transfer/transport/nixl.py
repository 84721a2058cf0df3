"""KV read from the producer's cache by a NIXL agent (UCX): with RDMA between hosts, and by the
kernel (cross-memory attach) within one. The producer announces block ids, as in mapped.py; neither
its threads nor its GPU take part in a read.

What a dead or stopped peer does to NIXL 1.5.1 (UCX 1.23), and what follows from it here:

* A read that is cancelled may still write: a producer that was stopped and continued filled blocks
  after `releaseXferReq`. Only the end of the agent stops it. So each link of a consumer has its own
  agent, which ends before blocks are given back after an error.
* NIXL's progress thread and a call for the same connection race if the peer fails, and crash
  (ai-dynamo/nixl#1986). A consumer's agent has no such thread: only the link's reader uses it.
* Without RDMA and cross-memory attach, UCX emulates reads: the producer sends the bytes. If the
  consumer is gone, the producer's process aborts ("Fatal: unexpected error: Endpoint timeout",
  ucp_request_try_send). So only reads by the hardware or the kernel are used.
* UCX's TCP ports serve anyone who connects. With RDMA devices they are not opened, else on the
  loopback interface only.
* A new connection of an agent to the same peer may be reset by the close of the last one
  (ai-dynamo/nixl#2109). Here it is one of another agent.

A producer's agent has NIXL's progress thread, which connections need. It sleeps until something
arrives, and nothing else uses its connections.

Not run with RDMA or on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import secrets
import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.gpu_memory import device_regions
from kv_transfer.cache.host_memory import EndedCopy
from kv_transfer.errors import KvTransferError, LinkClosed, ProtocolError
from kv_transfer.protocol.link import ConsumerChannel
from kv_transfer.protocol.transport import Transport, TransportUnavailable, target_of
from kv_transfer.settings import rdma_devices
from kv_transfer.transport.mapped import MappedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import BlockCopy, KvRegion
    from kv_transfer.protocol.link import Link, ProducerChannel
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.protocol.transport import LocalKv
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)

_MARK_BYTES = 16
_Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
# The progress thread looks at its connections this often, besides when something arrives.
_PROGRESS_US = 100_000
_PROBE_S = 5.0  # deadline of the first read, which also connects
_SHORTEST_POLL_S, _LONGEST_POLL_S = 50e-6, 1e-3
# Read when the library is loaded. The end of an agent with reads in progress warns of each one; the
# handlers of signals are Python's and vLLM's; vLLM's connector sets the last against a leak in UCX.
_ENVIRONMENT = {
    "UCX_LOG_LEVEL": "error",
    "UCX_ERROR_SIGNALS": "",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}


def load() -> Any:
    """Return NIXL's bindings. Raises KvTransferError if they cannot be used."""
    if find_spec("nixl") is None:
        raise KvTransferError("the package nixl is missing: install pdserve[nixl]")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("nixl")._bindings
    except (ImportError, AttributeError) as error:
        raise KvTransferError(f"the package nixl cannot be loaded: {error}") from error


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Convert NIXL's exceptions, which have no base class of their own."""
    try:
        yield
    except KvTransferError:
        raise
    except Exception as error:  # noqa: BLE001
        raise KvTransferError(f"NIXL: {error}") from None


class Memory:
    """What one agent registers: the KV cache, and a mark that a peer reads to see that it can."""

    def __init__(self, local: LocalKv) -> None:
        """Raises KvTransferError if a page of the cache is not one run of bytes."""
        views = [x for region in device_regions(local.regions).values() for x in region.views]
        device = views[0].device if views else None
        self.is_gpu = device is not None and device.type == "cuda"
        self.device = device.index or 0 if device is not None and self.is_gpu else 0
        storages = [view.untyped_storage() for view in views]
        self.ranges = {x.data_ptr(): x.nbytes() for x in storages} or {
            region.address: region.size for region in local.regions.values()
        }
        self.pages = {group: _Pages.of(region) for group, region in local.regions.items()}
        self.mark = bytearray(_MARK_BYTES)
        self.mark_at = int(np.frombuffer(self.mark, np.uint8).ctypes.data)


class _Pages(NamedTuple):
    """The pages of a group of layers, as bytes of one process's memory."""

    address: int
    geometry: KvGeometry

    @classmethod
    def of(cls, region: KvRegion) -> _Pages:
        found = region.pages_in_memory()
        if found is None:
            raise KvTransferError("a page of the KV cache is not one run of bytes")
        return cls(*found)

    def narrowed(self, layers: range, start: int, size: int) -> _Pages:
        return self._replace(geometry=self.geometry.narrowed(layers, start, size))

    def starts(self, block_ids: list[int], *, by_layer: bool) -> NDArray[np.uint64]:
        """Return the addresses of all pages of these blocks, in the order of layers or blocks.
        Raises KvTransferError for an unknown block id."""
        g = self.geometry
        if not g.has_blocks(block_ids):
            raise KvTransferError(f"a block id is not in the KV cache of {g.num_blocks} blocks")
        blocks = np.array(block_ids, np.uint64) * np.uint64(g.block_stride_bytes)
        layers = np.arange(g.num_layers, dtype=np.uint64) * np.uint64(g.layer_stride_bytes)
        pair = (layers[:, None], blocks) if by_layer else (blocks[:, None], layers)
        return (pair[0] + pair[1] + np.uint64(self.address + g.offset_bytes)).ravel()


def runs(
    to: _Pages, to_ids: list[int], source: _Pages, source_ids: list[int]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return (addresses to write, addresses to read, lengths): pages that follow each other at both
    ends are one run. Raises KvTransferError if the pages differ."""
    ours, theirs = to.geometry, source.geometry
    if (ours.num_layers, ours.page_bytes) != (theirs.num_layers, theirs.page_bytes):
        raise KvTransferError("the pages differ in number or size")
    if len(to_ids) != len(source_ids):
        raise ProtocolError(f"{len(source_ids)} blocks for {len(to_ids)} places")
    by_layer = theirs.layer_stride_bytes > theirs.block_stride_bytes
    into, read = to.starts(to_ids, by_layer=by_layer), source.starts(source_ids, by_layer=by_layer)
    size = np.uint64(ours.page_bytes)
    follows = (np.diff(into) == size) & (np.diff(read) == size)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = np.diff(np.append(first, len(into))).astype(np.uint64) * size
    return into[first], read[first], lengths


class Agent:
    """A NIXL agent. All methods raise KvTransferError. Used by one thread, except for what its own
    progress thread does. Ended by `close`."""

    def __init__(self, nixl: Any, memory: Memory, *, serves: bool) -> None:
        """`serves`: peers read from its memory."""
        self.name = secrets.token_hex(8)
        self._nixl, self._memory = nixl, memory
        self._reads: set[int] = set()
        self._agent: Any = None
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = serves, False
        config.syncMode, config.pthrDelay = nixl.NIXL_THREAD_SYNC_STRICT, _PROGRESS_US
        limits = "TLS=^tcp" if rdma_devices() else "NET_DEVICES=lo"
        options = {"ucx_error_handling_mode": "peer", "engine_config": limits}
        cache = [(at, size, memory.device, "") for at, size in memory.ranges.items()]
        with _errors():
            self._agent = nixl.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend("UCX", options)
            for kind, ranges in (
                (self._kind, cache),
                (nixl.DRAM_SEG, [(memory.mark_at, _MARK_BYTES, 0, "")]),
            ):
                self._agent.registerMem(nixl.nixlRegDList(kind, ranges), [self._backend])

    @property
    def _kind(self) -> Any:
        return self._nixl.VRAM_SEG if self._memory.is_gpu else self._nixl.DRAM_SEG

    def metadata(self) -> bytes:
        """Return what a peer needs to read this memory."""
        with _errors():
            return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes, name: str) -> None:
        """Prepare to read the memory of the agent `name`."""
        with _errors():
            if (found := self._agent.loadRemoteMD(metadata).decode()) != name:
                raise KvTransferError(f"NIXL: the metadata is of the agent {found}, not {name}")

    def read(
        self,
        name: str,
        to: NDArray[np.uint64],
        source: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        device: int,
    ) -> int:
        """Begin to read runs of the KV cache of the agent `name`, which is on its GPU `device`.
        Return a handle."""
        return self._begin(
            name,
            self._kind,
            _rows(to, lengths, self._memory.device),
            _rows(source, lengths, device),
        )

    def read_mark(self, name: str, address: int) -> int:
        """Begin to read the mark of the agent `name` into ours."""
        lengths = np.array([_MARK_BYTES], np.uint64)
        to, source = (
            _rows(np.array([x], np.uint64), lengths, 0) for x in (self._memory.mark_at, address)
        )
        return self._begin(name, self._nixl.DRAM_SEG, to, source)

    def _begin(
        self, name: str, kind: Any, to: NDArray[np.uint64], source: NDArray[np.uint64]
    ) -> int:
        nixl = self._nixl
        with _errors():
            if self._agent is None:
                raise LinkClosed("the link has ended")
            lists = nixl.nixlXferDList(kind, to), nixl.nixlXferDList(kind, source)
            handle = int(
                self._agent.createXferReq(nixl.NIXL_READ, *lists, name, "", [self._backend])
            )
            self._reads.add(handle)
            self._agent.postXferReq(handle)
        return handle

    def has_ended(self, handle: int) -> bool:
        """Return True once all bytes of a read are there. Call it no more then."""
        with _errors():
            if self._agent is None:
                raise LinkClosed("the link has ended")
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return False
            self._reads.discard(handle)
            self._agent.releaseXferReq(handle)
        return True

    def close(self) -> None:
        """End the agent. Its reads write nothing any more. Idempotent."""
        while self._reads:
            with contextlib.suppress(KvTransferError), _errors():
                self._agent.releaseXferReq(self._reads.pop())
        self._agent = None  # the only reference


def _rows(
    addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], device: int
) -> NDArray[np.uint64]:
    return np.stack([addresses, lengths, np.full(len(lengths), device, np.uint64)], axis=1)


class _Offer(msgspec.Struct):
    """A producer's offer. `pages`: group, address and geometry of each region."""

    agent: str
    metadata: bytes
    pid: int
    mark: bytes
    mark_at: _Address
    has_rdma: bool
    is_gpu: bool
    device: _Address
    pages: list[list[_Address]]


def _parse(offer: Mapping[str, Any]) -> tuple[_Offer, dict[int, _Pages]]:
    """Return an offer and its pages by group. Raises TransportUnavailable."""
    try:
        made = msgspec.convert(offer, _Offer)
        pages = {
            group: _Pages(address, KvGeometry.from_list(values))
            for group, address, *values in made.pages
        }
    except ValueError as error:
        raise TransportUnavailable(f"the offer is not NIXL's: {error}") from error
    return made, pages


class _Read:
    """A read in progress, and then the digests of what it wrote."""

    def __init__(
        self,
        channel: NixlConsumer,
        handle: int,
        region: KvRegion,
        ids: list[int],
        checked: range | None,
    ) -> None:
        self._channel, self._handle = channel, handle
        self._region, self._ids, self._checked = region, ids, checked
        self._digests: BlockCopy | None = None

    @property
    def has_ended(self) -> bool:
        if self._digests is None:
            if not self._channel.agent.has_ended(self._handle):
                return False
            self._digests = self._region.begin_digests(self._ids, self._checked)
        return self._digests.has_ended

    def wait(self) -> bytes:
        try:
            self._channel.wait(lambda: self.has_ended)
        except BaseException:
            self._channel.close()  # or bytes might still arrive
            raise
        assert self._digests is not None, "the wait has ended"
        return self._digests.wait()


class NixlConsumer(ConsumerChannel):
    """The consumer's end of a link, with the link's agent."""

    is_pull = True
    name = "nixl"

    def __init__(
        self,
        local: LocalKv,
        memory: Memory,
        offer: _Offer,
        pages: Mapping[int, _Pages],
        agent: Agent,
        link: Link,
        timeout_s: float,
    ) -> None:
        self.agent = agent
        self._local, self._memory, self._offer, self._pages = local, memory, offer, pages
        self._link, self._timeout_s = link, timeout_s

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        if block_ids is None or part is None:
            return EndedCopy(b"")
        region = target_of(self._local.regions, part)
        if (peer := self._pages.get(part.group)) is None:
            raise KvTransferError(f"no layers of group {part.group} are in the producer's KV cache")
        source = peer.narrowed(part.source_layers, part.source_start, part.size)
        own = self._memory.pages[part.group]
        to = own.narrowed(part.target_layers, part.target_start, part.size)
        wanted = runs(to, block_ids, source, chunk.block_ids)
        try:
            handle = self.agent.read(self._offer.agent, *wanted, self._offer.device)
        except BaseException:
            self.close()
            raise
        return _Read(self, handle, region, block_ids, checked)

    def wait(self, has_ended: Callable[[], bool], timeout_s: float = 0.0) -> None:
        """Wait for a read, up to `timeout_s` or the time that a transfer may take without progress.
        Raises KvTransferError."""
        limit = timeout_s or self._timeout_s
        begun = time.monotonic()
        while not has_ended():
            if self._link.has_peer_left():
                raise LinkClosed(self._link.reason or "the peer closed the link")
            if (passed := time.monotonic() - begun) > limit:
                raise KvTransferError(f"NIXL read nothing for {limit:g} s")
            time.sleep(min(max(passed / 8, _SHORTEST_POLL_S), _LONGEST_POLL_S))

    def probe(self) -> None:
        """Read the producer's mark, which also connects. Raises KvTransferError."""
        handle = self.agent.read_mark(self._offer.agent, self._offer.mark_at)
        self.wait(lambda: self.agent.has_ended(handle), _PROBE_S)
        if self._memory.mark != self._offer.mark:
            raise KvTransferError("NIXL read other bytes than the producer has")

    def close(self) -> None:
        self.agent.close()


class NixlTransport(Transport):
    """The NIXL transport of a process. The first offer registers the KV cache, once for all links
    to consumers; each link to a producer registers it with its own agent."""

    name = "nixl"

    def __init__(self, settings: ConnectorConfig) -> None:
        """Raises KvTransferError if NIXL cannot be used."""
        self._nixl = load()
        self._timeout_s = settings.receive_timeout_s
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._offer: dict[str, Any] | None = None

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        with self._lock:
            if self._offer is None:
                try:
                    self._serve(local)
                except KvTransferError as error:
                    logger.warning("nixl is not offered: %s", error)
            return self._offer

    def _serve(self, local: LocalKv) -> None:
        memory = Memory(local)
        memory.mark[:] = secrets.token_bytes(_MARK_BYTES)
        self._agent = Agent(self._nixl, memory, serves=True)
        self._offer = {
            "agent": self._agent.name,
            "metadata": self._agent.metadata(),
            "pid": os.getpid(),
            "mark": bytes(memory.mark),
            "mark_at": memory.mark_at,
            "has_rdma": bool(rdma_devices()),
            "is_gpu": memory.is_gpu,
            "device": memory.device,
            "pages": [[n, x.address, *x.geometry.to_list()] for n, x in memory.pages.items()],
        }

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        theirs, pages = _parse(offer)
        if not (theirs.has_rdma and rdma_devices()) and not _may_read(theirs):
            raise TransportUnavailable(
                "neither RDMA nor cross-memory attach reaches the producer's memory"
            )
        channel: NixlConsumer | None = None
        try:
            memory = Memory(local)
            if memory.is_gpu != theirs.is_gpu:
                raise KvTransferError("one KV cache is in GPU memory and one is not")
            agent = Agent(self._nixl, memory, serves=False)
            channel = NixlConsumer(local, memory, theirs, pages, agent, link, self._timeout_s)
            agent.connect(theirs.metadata, theirs.agent)
            channel.probe()
        except KvTransferError as error:
            if channel is not None:
                channel.close()
            raise TransportUnavailable(str(error)) from error
        return channel, {}

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        return MappedProducer(link, self.name)

    def close(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.close()
            self._agent = self._offer = None


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _may_read(offer: _Offer) -> bool:
    """Return True if the kernel lets this process read the producer's memory. It does not between
    hosts or PID namespaces, where the process id is another's."""
    found = ctypes.create_string_buffer(_MARK_BYTES)
    to = _IoVec(ctypes.addressof(found), _MARK_BYTES)
    source = _IoVec(offer.mark_at, _MARK_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    count = libc.process_vm_readv(
        offer.pid,
        ctypes.byref(to),
        ctypes.c_ulong(1),
        ctypes.byref(source),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return bool(count == _MARK_BYTES and found.raw == offer.mark)
