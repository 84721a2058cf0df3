"""The NCCL calls that the transport makes, by ctypes, from the library that torch brings.

The official Python binding (nccl4py) is built for the newest NCCL, so that an older library lacks
symbols, and changes its interface with each release. These functions have had one C interface
since 2.17, and ctypes releases the interpreter lock around each.

The config struct is passed in its 2.17 form. NCCL copies `size` bytes of it, checks `magic`, and
gives every field newer than `version` its default, so one form serves all later releases.
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
    """ncclResult_t. UNKNOWN is any other code. On a non-blocking communicator IN_PROGRESS is the
    ordinary answer."""

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


class _Config(ctypes.Structure):
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
        ctypes.POINTER(_Config),
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
        """Return the version as NCCL counts it: 2.30.7 is 23007."""
        number = ctypes.c_int()
        self._lib.ncclGetVersion(ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """Return UNIQUE_ID_BYTES that name a new communicator. Raises KvTransferError."""
        made = _UniqueId()
        result = Result(self._lib.ncclGetUniqueId(ctypes.byref(made)))
        if result is not Result.SUCCESS:
            raise KvTransferError(f"NCCL made no unique id: {result.name}: {self.last_error(0)}")
        return bytes(made)

    def comm_init(self, unique_id: bytes, rank: int, max_ctas: int) -> tuple[Result, int]:
        """Begin to join a communicator. `max_ctas` limits its thread blocks, and no others'."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            return Result.INVALID_ARGUMENT, 0
        comm = _COMM()
        size = ctypes.sizeof(_Config)
        config = _Config(size, _CONFIG_MAGIC, MIN_VERSION, 0, _UNDEFINED, 1, max_ctas, None)
        result = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm),
            2,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        return Result(result), comm.value or 0

    def async_error(self, comm: int) -> Result:
        """Return IN_PROGRESS while NCCL works on the last call, else how that ended."""
        state = ctypes.c_int()
        asked = Result(self._lib.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        return Result(state.value) if asked is Result.SUCCESS else asked

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return Result(self._lib.ncclSend(address, size_bytes, _UINT8, peer, comm, stream))

    def recv(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        """Enqueue a receive of exactly what rank `peer` sends: NCCL does not compare sizes."""
        return Result(self._lib.ncclRecv(address, size_bytes, _UINT8, peer, comm, stream))

    def group_start(self) -> Result:
        """Begin to collect this thread's sends or receives, which group_end posts as one."""
        return Result(self._lib.ncclGroupStart())

    def group_end(self) -> Result:
        return Result(self._lib.ncclGroupEnd())

    def abort(self, comm: int) -> Result:
        """End what runs and free the communicator, whatever this returns. May take its time."""
        return Result(self._lib.ncclCommAbort(comm))

    def last_error(self, comm: int) -> str:
        said: bytes | None = self._lib.ncclGetLastError(comm or None)
        return (said or b"").decode("utf-8", "replace").strip()


def find_library(maps: Path = Path("/proc/self/maps")) -> Path:
    """Return the file that PDSERVE_NCCL_SO names, else the NCCL that this process has loaded
    (torch's), else the one that torch's wheels have installed. Raises KvTransferError."""
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
    """Load NCCL, apart from any other copy in the process. Raises KvTransferError."""
    path = find_library()
    try:
        return Nccl(ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW))
    except OSError as error:
        raise KvTransferError(f"{path} cannot be loaded: {error}") from error
