"""The binding against a library made of C functions of our own: what crosses the C interface."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.nccl import binding
from kv_transfer.nccl.binding import (
    UNIQUE_ID_BYTES,
    CommConfig,
    NcclLibrary,
    NcclUnavailable,
    Result,
    find_library,
    load,
)

UID = bytes(range(UNIQUE_ID_BYTES))
COMM = 0x7FFF12345678
# ncclConfig_t of 2.17, by hand: size, magic, version, blocking, cluster, min, max CTAs, net name.
CONFIG = [40, 0xCAFEBEEF, 21700, 0, -(2**31), 2, 6, None]


class CLibrary:
    """A library whose functions are C functions of the prototypes' types, answered by Python."""

    def __init__(self, version: int = 23007) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, int] = {}
        self.async_state = 7
        self.version = version
        self.functions = {
            name: ctypes.CFUNCTYPE(self._result(name), *types)(self._answer(name))
            for name, types in binding.PROTOTYPES.items()
        }

    @staticmethod
    def _result(name: str) -> Any:
        return ctypes.c_char_p if name == "ncclGetLastError" else ctypes.c_int

    def _answer(self, name: str) -> Any:
        return getattr(self, name, self._record(name))

    def _record(self, name: str) -> Any:
        def record(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.answers.get(name, 0)

        return record

    def ncclGetVersion(self, number: Any) -> int:  # noqa: N802
        number[0] = self.version
        return 0

    def ncclGetUniqueId(self, made: Any) -> int:  # noqa: N802
        ctypes.memmove(made, UID, UNIQUE_ID_BYTES)
        return self.answers.get("ncclGetUniqueId", 0)

    def ncclCommInitRankConfig(  # noqa: N802
        self, comm: Any, ranks: int, uid: Any, rank: int, config: Any
    ) -> int:
        fields = [getattr(config[0], name) for name, _ in config[0]._fields_]
        self.calls.append(("ncclCommInitRankConfig", ranks, bytes(uid), rank, fields))
        comm[0] = COMM
        return 7

    def ncclCommGetAsyncError(self, comm: int, state: Any) -> int:  # noqa: N802
        state[0] = self.async_state
        return self.answers.get("ncclCommGetAsyncError", 0)

    def ncclGetLastError(self, comm: int | None) -> Any:  # noqa: N802
        self.calls.append(("ncclGetLastError", comm))
        return ctypes.cast(ctypes.c_char_p(b"the cable is out \n"), ctypes.c_void_p).value

    def load(self) -> NcclLibrary:
        return NcclLibrary(SimpleNamespace(**self.functions))


def test_a_communicator_is_asked_for_without_blocking_and_with_its_own_limits() -> None:
    library = CLibrary()
    made = library.load().comm_init(UID, 1, CommConfig(2, 6))
    assert made == (Result.IN_PROGRESS, COMM)
    assert library.calls == [("ncclCommInitRankConfig", 2, UID, 1, CONFIG)]


@pytest.mark.parametrize(("uid", "rank"), [(UID[:-1], 0), (UID, 2), (UID, -1)])
def test_what_is_no_communicator_does_not_reach_nccl(uid: bytes, rank: int) -> None:
    library = CLibrary()
    assert library.load().comm_init(uid, rank, CommConfig()) == (Result.INVALID_ARGUMENT, 0)
    assert library.calls == []


def test_addresses_and_sizes_beyond_32_bits_arrive_whole() -> None:
    library = CLibrary()
    nccl = library.load()
    library.answers = {"ncclSend": 7, "ncclRecv": 5}
    assert nccl.send(COMM, 1, 0x7F00_0000_1000, 5 << 32, 0x5500_0000_0008) is Result.IN_PROGRESS
    assert nccl.recv(COMM, 0, 0x7F00_0000_2000, 6 << 32, 0x5500_0000_0010) is Result.INVALID_USAGE
    assert library.calls == [
        ("ncclSend", 0x7F00_0000_1000, 5 << 32, 1, 1, COMM, 0x5500_0000_0008),
        ("ncclRecv", 0x7F00_0000_2000, 6 << 32, 1, 0, COMM, 0x5500_0000_0010),
    ]


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("finalize", "ncclCommFinalize"),
        ("destroy", "ncclCommDestroy"),
        ("abort", "ncclCommAbort"),
    ],
)
def test_each_end_of_a_communicator_is_its_own_call(method: str, function: str) -> None:
    library = CLibrary()
    nccl = library.load()
    library.answers = {function: 7}
    assert getattr(nccl, method)(COMM) is Result.IN_PROGRESS
    assert library.calls == [(function, COMM)]


def test_a_group_begins_and_ends() -> None:
    library = CLibrary()
    nccl = library.load()
    library.answers = {"ncclGroupEnd": 7}
    assert (nccl.group_start(), nccl.group_end()) == (Result.SUCCESS, Result.IN_PROGRESS)
    assert [call[0] for call in library.calls] == ["ncclGroupStart", "ncclGroupEnd"]


def test_an_async_error_is_the_communicators_state_unless_it_cannot_be_asked() -> None:
    library = CLibrary()
    nccl = library.load()
    assert nccl.async_error(COMM) is Result.IN_PROGRESS
    library.async_state = 6
    assert nccl.async_error(COMM) is Result.REMOTE_ERROR
    library.answers = {"ncclCommGetAsyncError": 4}
    assert nccl.async_error(COMM) is Result.INVALID_ARGUMENT


def test_a_code_of_a_later_nccl_is_unknown_and_no_success() -> None:
    library = CLibrary()
    nccl = library.load()
    library.async_state = 77
    assert nccl.async_error(COMM) is Result.UNKNOWN


def test_a_unique_id_is_all_of_its_bytes() -> None:
    assert CLibrary().load().unique_id() == UID


def test_no_unique_id_is_refused_in_nccls_words() -> None:
    library = CLibrary()
    library.answers = {"ncclGetUniqueId": 2}
    with pytest.raises(NcclUnavailable, match=r"SYSTEM_ERROR: the cable is out$"):
        library.load().unique_id()


def test_version_mismatch_an_nccl_without_the_config_is_refused() -> None:
    with pytest.raises(NcclUnavailable, match="21600 is older"):
        CLibrary(version=21600).load()


def test_a_library_without_a_function_is_refused_by_name() -> None:
    functions = CLibrary().functions
    del functions["ncclCommAbort"]
    with pytest.raises(NcclUnavailable, match="ncclCommAbort"):
        NcclLibrary(SimpleNamespace(**functions))


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (1, 33)])
def test_limits_that_are_none_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="max_ctas"):
        CommConfig(low, high)


def test_the_configured_library_comes_first(tmp_path: Path) -> None:
    ours = tmp_path / "our nccl.so"
    ours.touch()
    assert find_library(str(ours)) == ours
    with pytest.raises(NcclUnavailable, match="no file"):
        find_library(str(tmp_path / "none.so"))


def test_the_library_that_is_loaded_comes_next(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 rw-p 00000000 00:00 0\n"
        "7f01-7f02 r-xp 00000000 08:01 9   /lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 10  /a folder/libnccl.so.2\n"
    )
    assert find_library(maps=maps) == Path("/a folder/libnccl.so.2")


def test_a_machine_without_nccl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    maps = tmp_path / "maps"
    maps.touch()
    with pytest.raises(NcclUnavailable, match="no NCCL is loaded, installed or configured"):
        find_library(maps=maps)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    ours = tmp_path / "libnccl.so.2"
    ours.write_text("not ELF")
    with pytest.raises(NcclUnavailable, match="cannot be loaded"):
        load(str(ours))


def test_nothing_here_touches_the_environment() -> None:
    for path in sorted(Path(binding.__file__).parent.glob("*.py")):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        assert not names & {"environ", "environb", "putenv", "getenv", "unsetenv"}, path
