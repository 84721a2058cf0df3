"""A ctypes binding of CUDA runtime calls that torch lacks, or makes while it holds the interpreter
lock. ctypes releases the lock, because closing a mapping may wait for the GPU.

Batched copies run on the GPU's copy engines, so they take no multiprocessor from the engine's
kernels. `cudaMemcpyBatchAsync` has this form since CUDA 13; the form of 12.8 has one more argument
and is not used.

Ran on an H200 (benchmarks/results): a batch costs the host 4 us for each copy in it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from numpy.typing import NDArray

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_MEMCPY_DEFAULT = 4  # the direction follows from the addresses
_IN_STREAM_ORDER = 1  # the sources are read in the order of the stream
_CUDA_13 = 13000


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes. The locations (type and number) are hints for managed memory."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


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
        library.cudaMemcpyAsync.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        version = ctypes.c_int()
        self._check(library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self._has_batches = version.value >= _CUDA_13
        if self._has_batches:
            library.cudaMemcpyBatchAsync.argtypes = (
                *(ctypes.c_void_p,) * 3,
                ctypes.c_size_t,
                ctypes.POINTER(_CopyAttributes),
                ctypes.POINTER(ctypes.c_size_t),
                ctypes.c_size_t,
                ctypes.c_void_p,
            )
        library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def export(self, address: int) -> bytes:
        """Return the handle of the allocation that contains `address`."""
        handle = _IpcHandle()
        self._check(self._lib.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its address. Each call needs one `close`."""
        address = ctypes.c_void_p()
        made = _IpcHandle.from_buffer_copy(handle)
        self._check(self._lib.cudaIpcOpenMemHandle(ctypes.byref(address), made, _LAZY_PEER_ACCESS))
        return address.value or 0

    def close(self, address: int) -> None:
        self._check(self._lib.cudaIpcCloseMemHandle(address))

    def copy(
        self, to: NDArray[np.uint64], source: NDArray[np.uint64], size: int, stream: int
    ) -> None:
        """Enqueue a copy of `size` bytes from each address of `source` to the address in `to`, in
        any order. After an error, some may have been enqueued."""
        if not self._has_batches:
            for pair in zip(to.tolist(), source.tolist(), strict=True):
                self._check(self._lib.cudaMemcpyAsync(*pair, size, _MEMCPY_DEFAULT, stream))
            return
        sizes = np.full(len(to), size, np.uint64)
        attributes, first = _CopyAttributes(srcAccessOrder=_IN_STREAM_ORDER), ctypes.c_size_t(0)
        self._check(
            self._lib.cudaMemcpyBatchAsync(
                *(each.ctypes.data for each in (to, source, sizes)),
                len(to),
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                stream,
            )
        )

    def _check(self, result: int) -> None:
        if result:
            text: bytes = self._lib.cudaGetErrorString(result)
            self._lib.cudaGetLastError()  # clear it, or torch's next call would raise it
            raise KvTransferError(f"CUDA: {text.decode()}")


@cache
def load() -> CudaRuntime:
    """Return the runtime that torch has loaded. Raises KvTransferError."""
    name = f"libcudart.so.{str(torch.version.cuda).split('.', 1)[0]}"
    try:
        return CudaRuntime(ctypes.CDLL(name))
    except (OSError, AttributeError) as error:
        raise KvTransferError(f"{name} cannot be used: {error}") from error
