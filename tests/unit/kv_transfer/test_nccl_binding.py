"""The ctypes binding, over a library in Python."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.errors import KvTransferError
from kv_transfer.transport.nccl.binding import (
    LIBRARY_VARIABLE,
    PROTOTYPES,
    UNIQUE_ID_BYTES,
    Nccl,
    Result,
    find_library,
    load,
)

if TYPE_CHECKING:
    from pathlib import Path


class CFunction:
    """A function that checks its ctypes prototype at each call."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.argtypes: Any = ()
        self.restype: Any = None
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> Any:
        assert len(given) == len(self.argtypes)
        self.calls.append(given)
        return self.answer(*given) if callable(self.answer) else self.answer


def library(version: int = 23007, **answers: Any) -> Any:
    def tell_version(out: Any) -> int:
        out._obj.value = version
        return 0

    made = {name: CFunction(0) for name in PROTOTYPES}
    made["ncclGetVersion"] = CFunction(tell_version)
    made["ncclGetLastError"] = CFunction(b"why ")
    made |= {name: CFunction(answer) for name, answer in answers.items()}
    return SimpleNamespace(**made)


def test_a_communicator_is_non_blocking_and_has_its_own_limit() -> None:
    """The config has the layout of NCCL 2.17, which later versions accept."""
    seen: list[bytes] = []

    def init(comm: Any, ranks: int, unique_id: Any, rank: int, config: Any) -> int:
        seen.append(bytes(config._obj))
        assert (ranks, rank, bytes(unique_id)) == (2, 1, b"u" * UNIQUE_ID_BYTES)
        comm._obj.value = 77
        return 7

    nccl = Nccl(library(ncclCommInitRankConfig=init))
    assert nccl.comm_init(b"u" * UNIQUE_ID_BYTES, 1, 4) == (Result.IN_PROGRESS, 77)
    words = (ctypes.c_uint32 * 8).from_buffer_copy(seen[0])
    assert list(words) == [40, 0, 0xCAFEBEEF, 21700, 0, 2**31, 1, 4]
    assert len(seen[0]) == 40
    assert nccl.comm_init(b"short", 1, 4) == (Result.INVALID_ARGUMENT, 0)


def test_answers_are_results_and_unknown_ones_are_unknown() -> None:
    def state(comm: int, out: Any) -> int:
        out._obj.value = 99
        return 0

    nccl = Nccl(library(ncclCommGetAsyncError=state, ncclSend=7, ncclRecv=3))
    assert nccl.async_error(1) is Result.UNKNOWN
    assert nccl.send(1, 1, 0, 8, 0) is Result.IN_PROGRESS
    assert nccl.recv(1, 1, 0, 8, 0) is Result.INTERNAL_ERROR
    assert nccl.last_error(1) == "why"
    with pytest.raises(KvTransferError, match="no unique id: SYSTEM_ERROR: why"):
        Nccl(library(ncclGetUniqueId=2)).unique_id()


def test_a_library_that_is_too_old_or_lacks_a_function_is_refused() -> None:
    with pytest.raises(KvTransferError, match="NCCL 21600 is older than 21700"):
        Nccl(library(21600))
    lacking = library()
    del lacking.ncclCommAbort
    with pytest.raises(KvTransferError, match="no ncclCommAbort"):
        Nccl(lacking)


def test_the_library_is_the_one_that_is_named_or_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "libnccl.so.2"
    chosen.write_bytes(b"not a library")
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12 {chosen}\n0-1 r-xp 0 0 0\n")
    assert find_library(maps) == chosen
    monkeypatch.setenv(LIBRARY_VARIABLE, str(chosen))
    assert find_library() == chosen
    with pytest.raises(KvTransferError, match="cannot be loaded"):
        load()
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(KvTransferError, match="is not a file"):
        find_library()


def test_a_variable_that_takes_deadlines_away_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It overrides the configuration of each communicator."""
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    with pytest.raises(KvTransferError, match="NCCL_COMM_BLOCKING"):
        load()
