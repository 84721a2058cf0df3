"""One CUDA GPU: memory, streams and events of the runtime, and the kernels that gather and scatter.
Imported only where a transport that needs a GPU is configured."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from kv_transfer import gather as torch_kernels
from kv_transfer.device import runtime as cuda_runtime
from kv_transfer.device.base import StreamError
from kv_transfer.device.region import DeviceRegion
from kv_transfer.device.runtime import CudaEvent, CudaRuntime
from kv_transfer.errors import UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.device.base import Event, Mover
    from kv_transfer.memory import KvRegion
    from kv_transfer.reshard import Span


class _Bytes:
    """Device memory as torch takes it without a copy (CUDA array interface, version 3)."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice:
    """See Device. Its streams live as long as the process."""

    def __init__(self, runtime: CudaRuntime, index: int) -> None:
        self.runtime = runtime
        self.index = index
        self.uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        self._lock = threading.Lock()
        self._streams: dict[str, int] = {}

    def bind(self) -> None:
        self.runtime.call("cudaSetDevice", self.index)

    def allocate(self, size_bytes: int) -> int:
        self.bind()
        return self.runtime.allocate(size_bytes)

    def free(self, address: int) -> None:
        self.bind()
        self.runtime.call("cudaFree", address)

    def open_stream(self) -> int:
        self.bind()
        return self.runtime.open_stream()

    def close_stream(self, stream: int) -> None:
        self.runtime.call("cudaStreamDestroy", stream)

    def record(self, stream: int) -> Event:
        return self.runtime.record(stream)

    def query(self, event: Event) -> bool:
        assert isinstance(event, CudaEvent)
        return self.runtime.query(event)

    def mover(self, region: KvRegion) -> Mover:
        if not isinstance(region, DeviceRegion) or region.device.index != self.index:
            raise UnsupportedLayout(f"the KV cache is not in the memory of GPU {self.index}")
        return _CudaMover(self, region)

    def stream_for(self, purpose: str) -> int:
        """One of all movers: what goes one way is in order anyhow."""
        with self._lock:
            if purpose not in self._streams:
                self._streams[purpose] = self.open_stream()
            return self._streams[purpose]

    def copy(self, target: int, source: int, size_bytes: int) -> Event:
        """Begins a copy between staging slots, those of another process too."""
        self.bind()
        stream = self.stream_for("copy")
        self.runtime.copy(target, source, size_bytes, stream)
        return self.runtime.record(stream)

    def export_memory(self, address: int) -> bytes:
        self.bind()
        return self.runtime.export_memory(address)

    def open_memory(self, handle: bytes) -> int:
        self.bind()
        return self.runtime.open_memory(handle)

    def close_memory(self, address: int) -> None:
        self.bind()
        self.runtime.close_memory(address)

    def move(
        self,
        region: DeviceRegion,
        block_ids: Sequence[int],
        tokens: Span | None,
        address: int,
        how: str,
    ) -> Event:
        """Begins a gather or a scatter. It waits, on the GPU, for what the engine had begun when
        its last step was noted: that may still write, or read, the blocks."""
        piece, table = region.piece(block_ids, tokens)
        size = region.cache.size_bytes(piece)
        stream = self.stream_for(how)
        try:
            with torch.cuda.device(self.index):
                ours = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
                    stream, device=self.index
                )
                with torch.cuda.stream(ours):
                    if region.computed_event is not None:
                        ours.wait_event(region.computed_event)
                    staging = torch.as_tensor(_Bytes(address, size), device=f"cuda:{self.index}")
                    getattr(torch_kernels, how)(region.cache, piece, table, staging)
                return self.record(stream)
        except RuntimeError as error:
            raise StreamError(f"{how}: {error}") from error


class _CudaMover:
    """See Mover."""

    def __init__(self, device: CudaDevice, region: DeviceRegion) -> None:
        self._device = device
        self._region = region

    def gather(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> Event:
        return self._device.move(self._region, block_ids, tokens, address, "gather")

    def scatter(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> Event:
        return self._device.move(self._region, block_ids, tokens, address, "scatter")


def current_device() -> CudaDevice:
    """The calling thread's GPU. Raises StreamError where there is none that torch can use."""
    if not torch.cuda.is_available():
        raise StreamError("torch finds no CUDA GPU on this machine")
    return CudaDevice(cuda_runtime.load(), torch.cuda.current_device())
