"""A ctypes binding of calls of the CUDA runtime that torch lacks, or makes while it holds the
interpreter lock. ctypes releases the lock: closing a mapping may wait for the GPU.

Not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from kv_transfer.errors import KvTransferError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaRuntime:
    """Calls for the GPU of the calling thread. All raise KvTransferError."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        library.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(_IpcHandle), ctypes.c_void_p)
        library.cudaIpcOpenMemHandle.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            _IpcHandle,
            ctypes.c_uint,
        )
        library.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
        library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def export(self, address: int) -> bytes:
        """Return the handle of the allocation that contains `address`."""
        handle = _IpcHandle()
        self._check(self._lib.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its address. Each needs one `close`."""
        address = ctypes.c_void_p()
        made = _IpcHandle.from_buffer_copy(handle)
        self._check(self._lib.cudaIpcOpenMemHandle(ctypes.byref(address), made, _LAZY_PEER_ACCESS))
        return address.value or 0

    def close(self, address: int) -> None:
        self._check(self._lib.cudaIpcCloseMemHandle(address))

    def _check(self, result: int) -> None:
        if result:
            text: bytes = self._lib.cudaGetErrorString(result)
            self._lib.cudaGetLastError()  # clears it, else torch's next call would raise it
            raise KvTransferError(f"CUDA: {text.decode()}")


@cache
def load() -> CudaRuntime:
    """Return the runtime that torch has loaded. Raises KvTransferError."""
    name = f"libcudart.so.{str(torch.version.cuda).split('.', 1)[0]}"
    try:
        return CudaRuntime(ctypes.CDLL(name))
    except (OSError, AttributeError) as error:
        raise KvTransferError(f"{name} cannot be used: {error}") from error
