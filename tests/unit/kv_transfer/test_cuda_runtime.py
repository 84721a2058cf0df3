"""The CUDA runtime's binding against C functions of our own, and a GPU's device over it."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kv_transfer.device import cuda, runtime
from kv_transfer.device.base import StreamError
from kv_transfer.device.cuda import CudaDevice, current_device
from kv_transfer.device.runtime import IPC_HANDLE_BYTES, CudaRuntime, load
from kv_transfer.errors import UnsupportedLayout
from tests.unit.kv_transfer.caches import Cache, geometry
from tests.unit.kv_transfer.test_device_region import BLOCKS, caches, device_region

if TYPE_CHECKING:
    from pathlib import Path

HANDLE = bytes(range(1, IPC_HANDLE_BYTES + 1))
MADE = 0x7F00_0000_0000
NOT_READY, ILLEGAL = 600, 700


class CLibrary:
    """A runtime whose functions are C functions of the prototypes' types, answered by Python."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, int] = {}
        self.functions = {
            name: ctypes.CFUNCTYPE(self._result(name), *types)(self._answer(name, types))
            for name, types in runtime.PROTOTYPES.items()
        }

    @staticmethod
    def _result(name: str) -> Any:
        return ctypes.c_void_p if name == "cudaGetErrorString" else ctypes.c_int

    def _answer(self, name: str, types: tuple[Any, ...]) -> Any:
        if name == "cudaGetErrorString":
            self._words = ctypes.create_string_buffer(b"an illegal memory access")
            return lambda code: ctypes.addressof(self._words)
        if name == "cudaIpcGetMemHandle":
            return self._export

        def answer(*arguments: Any) -> int:
            makes = bool(types) and types[0] is runtime._OUT
            seen = arguments[1:] if makes else arguments
            self.calls.append(
                (name, *(bytes(x) if isinstance(x, ctypes.Structure) else x for x in seen))
            )
            code = self.answers.get(name, 0)
            if makes and not code:
                arguments[0][0] = MADE
            return code

        return answer

    def _export(self, handle: Any, address: int) -> int:
        self.calls.append(("cudaIpcGetMemHandle", address))
        ctypes.memmove(handle, HANDLE, IPC_HANDLE_BYTES)
        return self.answers.get("cudaIpcGetMemHandle", 0)

    def load(self) -> CudaRuntime:
        return CudaRuntime(SimpleNamespace(**self.functions))


def test_each_call_passes_what_the_interface_says() -> None:
    library = CLibrary()
    cuda = library.load()
    assert cuda.allocate(5 << 32) == MADE
    assert cuda.open_stream() == MADE
    cuda.copy(MADE, MADE + 1, 6 << 32, 0x10)
    assert cuda.export_memory(MADE) == HANDLE
    assert cuda.open_memory(HANDLE) == MADE
    cuda.close_memory(MADE)
    assert library.calls == [
        ("cudaMalloc", 5 << 32),
        ("cudaStreamCreateWithFlags", 1),
        ("cudaMemcpyAsync", MADE, MADE + 1, 6 << 32, 4, 0x10),
        ("cudaIpcGetMemHandle", MADE),
        ("cudaIpcOpenMemHandle", HANDLE, 1),
        ("cudaIpcCloseMemHandle", MADE),
    ]


def test_an_event_fires_fails_and_is_released_with_its_last_reference() -> None:
    library = CLibrary()
    cuda = library.load()
    event = cuda.record(0x10)
    library.answers = {"cudaEventQuery": NOT_READY}
    assert not cuda.query(event)
    library.answers = {}
    assert cuda.query(event)
    library.answers = {"cudaEventQuery": ILLEGAL}
    with pytest.raises(StreamError, match=r"cudaEventQuery: an illegal memory access \(700\)"):
        cuda.query(event)
    library.calls.clear()
    del event
    assert library.calls == [("cudaEventDestroy", MADE)]


def test_an_error_is_taken_from_the_runtime_so_that_nobody_else_finds_it() -> None:
    library = CLibrary()
    library.answers = {"cudaMalloc": 2}
    with pytest.raises(StreamError, match="cudaMalloc"):
        library.load().allocate(1)
    assert library.calls[-1] == ("cudaGetLastError",)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_handle_of_another_length_opens_nothing(size: int) -> None:
    library = CLibrary()
    with pytest.raises(StreamError, match=f"{size} bytes"):
        library.load().open_memory(bytes(size))
    assert library.calls == []


def test_a_runtime_that_lacks_a_call_is_refused_by_its_name() -> None:
    library = CLibrary()
    del library.functions["cudaIpcGetMemHandle"]
    with pytest.raises(StreamError, match="cudaIpcGetMemHandle"):
        library.load()


def test_a_process_without_the_runtime_says_so(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1234 /usr/lib/libcuda_rt.so.13\n0-1 r-xp 0 0 0\n"
    )
    with pytest.raises(StreamError, match="without CUDA"):
        load(maps)


def device(monkeypatch: pytest.MonkeyPatch, library: CLibrary) -> CudaDevice:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}")
    )
    return CudaDevice(library.load(), 1)


def test_a_device_makes_streams_and_memory_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CLibrary()
    gpu = device(monkeypatch, library)
    assert gpu.uuid == "GPU-uuid-1"
    gpu.free(gpu.allocate(64))
    stream = gpu.open_stream()
    assert gpu.query(gpu.record(stream))
    gpu.close_stream(stream)
    names = [call[0] for call in library.calls]
    for name in ("cudaMalloc", "cudaFree", "cudaStreamCreateWithFlags"):
        assert library.calls[names.index(name) - 1] == ("cudaSetDevice", 1)


@pytest.mark.parametrize("how", ["gather", "scatter"])
@pytest.mark.parametrize("heads", ["all", "some"])
def test_a_copy_waits_for_the_step_that_fills_its_blocks(
    monkeypatch: pytest.MonkeyPatch, how: str, heads: str
) -> None:
    """On a stream of its own, behind the event that the step has left; its own event is behind the
    copy."""
    library, seen = CLibrary(), list[Any]()
    gpu = device(monkeypatch, library)
    region = device_region(caches("LBNHC"), BLOCKS)
    region.computed_event = "the step"  # type: ignore[assignment]
    if heads == "some":
        region = region.narrowed(0, region.geometry.page_bytes // 2)

    class Stream:
        def __init__(self, handle: int, device: int) -> None:
            self.handle = handle

        def wait_event(self, event: object) -> None:
            seen.append(("waits", self.handle, event))

    def copy(*_: object) -> None:
        assert library.calls[-1][0] != "cudaEventRecord"
        seen.append("copies")

    gpu._kernels = SimpleNamespace(**{how: copy})
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch, "as_tensor", lambda given, device: given)
    event = gpu.move(region, [2], None, MADE, how)
    assert seen == [("waits", MADE, "the step"), "copies"]
    assert library.calls[-1] == ("cudaEventRecord", MADE, MADE)
    assert gpu.query(event)


def test_a_cache_elsewhere_is_not_this_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = device(monkeypatch, CLibrary())
    for region in (Cache(geometry(), seed=1).region, device_region(caches("LBNHC"), BLOCKS)):
        with pytest.raises(UnsupportedLayout, match="not in the memory of GPU 1"):
            gpu.mover(region)


def test_without_a_gpu_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StreamError, match="no CUDA GPU"):
        current_device()


def test_the_kernels_are_tritons_where_there_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert cuda.kernels().__name__ == "kv_transfer.gather"
