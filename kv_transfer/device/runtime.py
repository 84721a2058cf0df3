"""The few calls of the CUDA runtime that we make, by ctypes, from the library that torch loaded.

Not torch.cuda: its streams come from a small pool that everything in the process shares, where one
that waits for a dead peer would stop somebody else's work; and it has no call for plain device
memory, nor for handles of it that another process may open.

C interface: cuda_runtime_api.h, stable since CUDA 11.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from kv_transfer.device.base import StreamError

_LIBRARY = "libcudart.so"
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_MEMCPY_DEFAULT = 4
_IPC_LAZY_PEER_ACCESS = 1
IPC_HANDLE_BYTES = 64


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_void_p)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudaSetDevice": (ctypes.c_int,),
    "cudaMalloc": (_OUT, ctypes.c_size_t),
    "cudaFree": (_POINTER,),
    "cudaMemcpyAsync": (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER),
    "cudaStreamCreateWithFlags": (_OUT, ctypes.c_uint),
    "cudaStreamDestroy": (_POINTER,),
    "cudaEventCreateWithFlags": (_OUT, ctypes.c_uint),
    "cudaEventRecord": (_POINTER, _POINTER),
    "cudaEventQuery": (_POINTER,),
    "cudaEventDestroy": (_POINTER,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), _POINTER),
    "cudaIpcOpenMemHandle": (_OUT, _IpcHandle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaGetErrorString": (ctypes.c_int,),
    "cudaGetLastError": (),
}


class CudaEvent:
    """A CUDA event. Released with its last reference."""

    def __init__(self, runtime: CudaRuntime, handle: int) -> None:
        self.handle = handle
        self._runtime = runtime

    def __del__(self) -> None:
        with contextlib.suppress(StreamError):
            self._runtime.call("cudaEventDestroy", self.handle)


class CudaRuntime:
    """`library` has the functions of PROTOTYPES. Every call raises StreamError with CUDA's words.
    Device, stream and memory are those of the calling thread's device."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        for name, types in PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None:
                raise StreamError(f"the CUDA runtime has no {name}")
            function.argtypes = types
            function.restype = ctypes.c_char_p if name == "cudaGetErrorString" else ctypes.c_int

    def call(self, name: str, *arguments: Any) -> None:
        """One function by its name."""
        self._check(name, getattr(self._lib, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            said: bytes = self._lib.cudaGetErrorString(code) or b""
            # Else a later call of somebody else would be blamed for it.
            self._lib.cudaGetLastError()
            raise StreamError(f"{name}: {said.decode('utf-8', 'replace')} ({code})")

    def _made(self, name: str, *arguments: Any) -> int:
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def allocate(self, size_bytes: int) -> int:
        """See Device."""
        return self._made("cudaMalloc", size_bytes)

    def open_stream(self) -> int:
        """See StreamOps."""
        return self._made("cudaStreamCreateWithFlags", _STREAM_NON_BLOCKING)

    def record(self, stream: int) -> CudaEvent:
        """See StreamOps."""
        event = CudaEvent(self, self._made("cudaEventCreateWithFlags", _EVENT_DISABLE_TIMING))
        self.call("cudaEventRecord", event.handle, stream)
        return event

    def query(self, event: CudaEvent) -> bool:
        """See StreamOps."""
        code = self._lib.cudaEventQuery(event.handle)
        if code == _NOT_READY:
            self._lib.cudaGetLastError()
            return False
        self._check("cudaEventQuery", code)
        return True

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Begins a copy between any two addresses, by the copy engine."""
        self.call("cudaMemcpyAsync", target, source, size_bytes, _MEMCPY_DEFAULT, stream)

    def export_memory(self, address: int) -> bytes:
        """IPC_HANDLE_BYTES by which another process of this host maps what `allocate` gave."""
        handle = _IpcHandle()
        self.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        """Maps another process's memory, and lets this device reach that of another one. Once a
        process and handle."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise StreamError(f"an IPC handle of {len(handle)} bytes")
        opened = _IpcHandle.from_buffer_copy(handle)
        return self._made("cudaIpcOpenMemHandle", opened, _IPC_LAZY_PEER_ACCESS)

    def close_memory(self, address: int) -> None:
        """Unmaps what `open_memory` gave."""
        self.call("cudaIpcCloseMemHandle", address)


def load(maps: Path = Path("/proc/self/maps")) -> CudaRuntime:
    """The runtime that this process has loaded. Raises StreamError where there is none."""
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(_LIBRARY):
            return CudaRuntime(ctypes.CDLL(fields[5], mode=os.RTLD_LOCAL | os.RTLD_NOW))
    raise StreamError("torch has loaded no CUDA runtime: it is a build without CUDA")
