"""A ctypes binding of the NCCL calls of the transport, for the library that torch ships.

The official Python binding (nccl4py) is not used: it is built for the newest NCCL, so older
libraries lack symbols, and its interface changes with each release. The C interface of these
functions has been stable since 2.17. ctypes releases the interpreter lock around each call.

The config struct is passed in its 2.17 form. NCCL copies `size` bytes of it, checks `magic`, and
sets every field newer than `version` to its default, so one form works with all later releases.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from enum import IntEnum
from pathlib import Path
from typing import Any

from kv_transfer.errors import KvTransferError

UNIQUE_ID_BYTES = 128
MIN_VERSION = 21700
_CONFIG_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
_UINT8 = 1
_LIBRARY = "libnccl.so"
LIBRARY_VARIABLE = "PDSERVE_NCCL_SO"  # for a newer NCCL than torch's


class Result(IntEnum):
    """ncclResult_t. UNKNOWN stands for any other code. Calls on a non-blocking communicator usually
    return IN_PROGRESS."""

    UNKNOWN = -1
    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8

    @classmethod
    def _missing_(cls, value: object) -> Result:
        return cls.UNKNOWN


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _NcclConfig(ctypes.Structure):
    """ncclConfig_t as of 2.17."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
    )


_COMM = ctypes.c_void_p
_MOVE = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMM, ctypes.c_void_p)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_COMM),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_NcclConfig),
    ),
    "ncclCommGetAsyncError": (_COMM, ctypes.POINTER(ctypes.c_int)),
    "ncclSend": _MOVE,
    "ncclRecv": _MOVE,
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommAbort": (_COMM,),
    "ncclGetLastError": (_COMM,),
}


class Nccl:
    """NCCL for non-blocking communicators of two ranks. A communicator is an opaque number; 0 means
    none. Raises KvTransferError if `library` lacks a function or is too old."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        for name, types in PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None:
                raise KvTransferError(f"the NCCL library has no {name}")
            function.argtypes = types
            function.restype = ctypes.c_char_p if name == "ncclGetLastError" else ctypes.c_int
        if self.version() < MIN_VERSION:
            raise KvTransferError(f"NCCL {self.version()} is older than {MIN_VERSION}")

    def version(self) -> int:
        """Return NCCL's version number: 23007 for 2.30.7."""
        number = ctypes.c_int()
        self._lib.ncclGetVersion(ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """Return the id of a new communicator, UNIQUE_ID_BYTES long. Raises KvTransferError."""
        made = _UniqueId()
        result = Result(self._lib.ncclGetUniqueId(ctypes.byref(made)))
        if result is not Result.SUCCESS:
            raise KvTransferError(f"NCCL made no unique id: {result.name}: {self.last_error(0)}")
        return bytes(made)

    def comm_init(self, unique_id: bytes, rank: int, max_ctas: int) -> tuple[Result, int]:
        """Start to join a communicator. `max_ctas` limits the thread blocks of this communicator
        only."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            return Result.INVALID_ARGUMENT, 0
        comm = _COMM()
        size = ctypes.sizeof(_NcclConfig)
        config = _NcclConfig(size, _CONFIG_MAGIC, MIN_VERSION, 0, _UNDEFINED, 1, max_ctas, None)
        result = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm),
            2,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        return Result(result), comm.value or 0

    def async_error(self, comm: int) -> Result:
        """Return IN_PROGRESS while NCCL works on the last call, then its result."""
        state = ctypes.c_int()
        asked = Result(self._lib.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        return Result(state.value) if asked is Result.SUCCESS else asked

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return Result(self._lib.ncclSend(address, size_bytes, _UINT8, peer, comm, stream))

    def recv(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        """Enqueue a receive from rank `peer`. `size_bytes` must equal the size of the send, because
        NCCL does not compare them."""
        return Result(self._lib.ncclRecv(address, size_bytes, _UINT8, peer, comm, stream))

    def group_start(self) -> Result:
        """Start to collect this thread's sends or receives; `group_end` posts them together."""
        return Result(self._lib.ncclGroupStart())

    def group_end(self) -> Result:
        return Result(self._lib.ncclGroupEnd())

    def abort(self, comm: int) -> Result:
        """Abort running operations and free the communicator, even if the result is an error. May
        be slow."""
        return Result(self._lib.ncclCommAbort(comm))

    def last_error(self, comm: int) -> str:
        text: bytes | None = self._lib.ncclGetLastError(comm or None)
        return (text or b"").decode("utf-8", "replace").strip()


def find_library(maps: Path = Path("/proc/self/maps")) -> Path:
    """Return the path in PDSERVE_NCCL_SO; else the NCCL library loaded in this process (torch's);
    else the one installed by torch's wheels. Raises KvTransferError."""
    if named := os.environ.get(LIBRARY_VARIABLE, ""):
        if not Path(named).is_file():
            raise KvTransferError(f"{LIBRARY_VARIABLE}: {named} is not a file")
        return Path(named)
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(_LIBRARY):
            return Path(fields[5])
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(folder, "lib").glob(f"{_LIBRARY}*")):
                return path
    raise KvTransferError("no NCCL library is loaded or installed")


def load() -> Nccl:
    """Load NCCL, separate from any other copy in the process. Raises KvTransferError."""
    if os.environ.get("NCCL_COMM_BLOCKING") == "1":
        raise KvTransferError("NCCL_COMM_BLOCKING=1 takes every deadline away: unset it")
    path = find_library()
    try:
        return Nccl(ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW))
    except OSError as error:
        raise KvTransferError(f"{path} cannot be loaded: {error}") from error
