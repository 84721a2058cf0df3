"""The few NCCL calls we make, by ctypes, from the library that torch brings.

Not the official Python binding (nccl4py): its releases are built for the newest NCCL, so that an
older one lacks symbols at the call; its interface changes from release to release; and it brings
cuda-core. What we need is a dozen functions whose C interface has been stable since 2.17, and
ctypes releases the interpreter lock around each.

The config struct is passed in its 2.17 form. NCCL copies `size` bytes of it, checks `magic`, and
gives every field newer than `version` its default, so one form serves all later releases.

Calls return a `Result` and raise nothing: on a non-blocking communicator IN_PROGRESS is the
ordinary answer, and what an error means is for the state machine to say.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from kv_transfer.errors import KvTransferError

UNIQUE_ID_BYTES = 128
MIN_VERSION = 21700
NUM_RANKS = 2
_CONFIG_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
_UINT8 = 1
_LIBRARY = "libnccl.so"


class NcclUnavailable(KvTransferError):
    """No NCCL that we can use; the message says why."""


class Result(IntEnum):
    """ncclResult_t; UNKNOWN is any code that this list does not have."""

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


@dataclass(frozen=True, slots=True)
class CommConfig:
    """What a communicator may use of its GPU: thread blocks, at least and at most."""

    min_ctas: int = 1
    max_ctas: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_ctas <= self.max_ctas <= 32:
            raise ValueError(f"min_ctas {self.min_ctas}, max_ctas {self.max_ctas}")


class Nccl(Protocol):
    """What the transport asks of NCCL. A communicator is an opaque number; 0 is none."""

    def version(self) -> int:
        """As NCCL counts: 2.30.7 is 23007."""
        ...

    def unique_id(self) -> bytes:
        """UNIQUE_ID_BYTES that name one communicator to be. Raises NcclUnavailable."""
        ...

    def comm_init(self, unique_id: bytes, rank: int, config: CommConfig) -> tuple[Result, int]:
        """Begins a non-blocking communicator of two ranks."""
        ...

    def async_error(self, comm: int) -> Result:
        """IN_PROGRESS while what was asked last goes on, else how it ended."""
        ...

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        """Enqueues the sending of memory to rank `peer`."""
        ...

    def recv(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        """Enqueues the receiving of exactly what rank `peer` sends: NCCL checks no sizes."""
        ...

    def group_start(self) -> Result:
        """What follows, until `group_end`, is enqueued as one."""
        ...

    def group_end(self) -> Result:
        """See `group_start`."""
        ...

    def finalize(self, comm: int) -> Result:
        """Begins an orderly end, which the other rank must ask for as well."""
        ...

    def destroy(self, comm: int) -> Result:
        """Frees a communicator whose `finalize` has ended."""
        ...

    def abort(self, comm: int) -> Result:
        """Ends what runs and frees the communicator, whatever it answers. May take its time."""
        ...

    def last_error(self, comm: int) -> str:
        """In NCCL's words."""
        ...


def check_versions(ours: int, theirs: int) -> None:
    """Two ranks of different NCCL refuse each other only after they have met, with an error that
    names neither; so they are compared before. Raises NcclUnavailable."""
    if ours != theirs:
        raise NcclUnavailable(f"NCCL {ours} here and {theirs} there")


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
    "ncclCommFinalize": (_COMM,),
    "ncclCommDestroy": (_COMM,),
    "ncclCommAbort": (_COMM,),
    "ncclGetLastError": (_COMM,),
}


class NcclLibrary:
    """NCCL itself. `library` has the functions of PROTOTYPES. Raises NcclUnavailable where one is
    missing or the version is too old."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        for name, types in PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None:
                raise NcclUnavailable(f"the library has no {name}")
            function.argtypes = types
            function.restype = ctypes.c_char_p if name == "ncclGetLastError" else ctypes.c_int
        if self.version() < MIN_VERSION:
            raise NcclUnavailable(f"NCCL {self.version()} is older than {MIN_VERSION}")

    def version(self) -> int:
        number = ctypes.c_int()
        self._lib.ncclGetVersion(ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        made = _UniqueId()
        result = Result(self._lib.ncclGetUniqueId(ctypes.byref(made)))
        if result is not Result.SUCCESS:
            raise NcclUnavailable(f"no unique id: {result.name}: {self.last_error(0)}")
        return bytes(made)

    def comm_init(self, unique_id: bytes, rank: int, config: CommConfig) -> tuple[Result, int]:
        if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < NUM_RANKS:
            return Result.INVALID_ARGUMENT, 0
        comm = _COMM()
        asked = _Config(
            ctypes.sizeof(_Config),
            _CONFIG_MAGIC,
            MIN_VERSION,
            0,
            _UNDEFINED,
            config.min_ctas,
            config.max_ctas,
            None,
        )
        result = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm),
            NUM_RANKS,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(asked),
        )
        return Result(result), comm.value or 0

    def async_error(self, comm: int) -> Result:
        state = ctypes.c_int()
        asked = Result(self._lib.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        return Result(state.value) if asked is Result.SUCCESS else asked

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return Result(self._lib.ncclSend(address, size_bytes, _UINT8, peer, comm, stream))

    def recv(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return Result(self._lib.ncclRecv(address, size_bytes, _UINT8, peer, comm, stream))

    def group_start(self) -> Result:
        return Result(self._lib.ncclGroupStart())

    def group_end(self) -> Result:
        return Result(self._lib.ncclGroupEnd())

    def finalize(self, comm: int) -> Result:
        return Result(self._lib.ncclCommFinalize(comm))

    def destroy(self, comm: int) -> Result:
        return Result(self._lib.ncclCommDestroy(comm))

    def abort(self, comm: int) -> Result:
        return Result(self._lib.ncclCommAbort(comm))

    def last_error(self, comm: int) -> str:
        said: bytes | None = self._lib.ncclGetLastError(comm or None)
        return (said or b"").decode("utf-8", "replace").strip()


def find_library(configured: str = "", maps: Path = Path("/proc/self/maps")) -> Path:
    """Which NCCL to load: the configured file, else the one that this process has loaded (torch's),
    else the one that torch's wheels have installed. Raises NcclUnavailable."""
    if configured:
        if not Path(configured).is_file():
            raise NcclUnavailable(f"{configured} is no file")
        return Path(configured)
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
    raise NcclUnavailable("no NCCL is loaded, installed or configured")


def load(configured: str = "") -> NcclLibrary:
    """Loads NCCL, apart from any other copy in the process. Raises NcclUnavailable."""
    path = find_library(configured)
    try:
        return NcclLibrary(ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW))
    except OSError as error:
        raise NcclUnavailable(f"{path} cannot be loaded: {error}") from error
