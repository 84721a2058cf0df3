"""Compiled code of `pdserve up`: which start runs it, and what makes it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.config import (
    DataParallelConfig,
    KvConfig,
    TiersConfig,
    WorkerConfig,
    load_config,
)
from pdserve.demo import MODEL_DIR
from pdserve.deploy.local import compiled_code, spare_compiler
from pdserve.deploy.local.compiled_code import CodeRecords, ModelCode, Record, decide, key_of
from pdserve.deploy.local.plan import ServicePlan
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess
from pdserve.deploy.local.spare_compiler import SpareCompiler
from pdserve.deploy.local.supervisor import BAD_CONFIG, FAILED, Supervisor
from pdserve.errors import ConfigError
from pdserve.net.rpc import Dialer
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.deploy.local.launcher import Launcher

PREFILL = WorkerConfig(model=str(MODEL_DIR), model_names=("m",), role=Role.PREFILL, cores=(0,))
DECODE = replace(PREFILL, role=Role.DECODE, cores=(1,))


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code.shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.fixture
def records(tmp_path: Path) -> CodeRecords:
    (tmp_path / "pdserve").mkdir()
    return CodeRecords(tmp_path)


def made(folder: Path) -> Record:
    """Return the record of a code that is there."""
    file = folder / "code" / "rank_0_0" / "model"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"code")
    return Record({str(file): 4})


def of(records: CodeRecords, **changes: Any) -> ModelCode:
    workers = {"prefill-0": replace(PREFILL, **changes), "decode-0": replace(DECODE, **changes)}
    return decide("m", workers, records)


def test_the_first_start_is_eager_and_the_next_one_compiled(
    records: CodeRecords, tmp_path: Path
) -> None:
    first = of(records)
    assert (first.kind, first.missing) == ("eager", (key_of(PREFILL),))
    assert "being made, used from the next start" in first.text
    records.write(key_of(PREFILL), made(tmp_path))
    second = of(records)
    assert (second.kind, second.missing) == ("compiled", ())
    assert second.names == ("prefill-0", "decode-0")


def test_all_workers_of_a_model_wait_for_the_code_of_each(
    records: CodeRecords, tmp_path: Path
) -> None:
    records.write(key_of(PREFILL), made(tmp_path))
    other = replace(DECODE, engine_args={"max_num_batched_tokens": 512})
    found = decide("m", {"prefill-0": PREFILL, "decode-0": other}, records)
    assert (found.kind, found.missing) == ("eager", (key_of(other),))


def test_code_that_is_gone_or_cut_off_is_made_again(records: CodeRecords, tmp_path: Path) -> None:
    record = made(tmp_path)
    records.write(key_of(PREFILL), record)
    (file,) = record.files
    os.truncate(file, 3)
    assert of(records).missing == (key_of(PREFILL),)
    Path(file).unlink()
    assert of(records).missing == (key_of(PREFILL),)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine_args": {"speculative_config": {"method": "ngram"}}}, "speculative_config"),
        ({"engine_args": {"quantization": "fp8"}}, "quantization"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "several ranks"),
        ({"data_parallel": DataParallelConfig(size=2, group="g")}, "several ranks"),
        ({"adapters": {"a": "/adapter"}}, "adapters"),
        ({"role": Role.AGGREGATED, "kv": KvConfig(tiers=TiersConfig(host_gib=1.0))}, "kv.tiers"),
        ({"weights_directories": ("/weights",)}, "weights_directories"),
    ],
)
def test_what_is_not_tested_compiled_stays_eager(
    records: CodeRecords, changes: dict[str, Any], named: str
) -> None:
    found = of(records, **changes)
    assert (found.kind, found.missing) == ("eager", ())
    assert named in found.text


def test_a_model_that_was_refused_or_has_no_compiler_stays_eager(
    records: CodeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.write(key_of(PREFILL), Record(refused="models with experts run eagerly"))
    found = of(records)
    assert (found.kind, found.missing) == ("eager", ())
    assert "models with experts" in found.text
    monkeypatch.setattr(compiled_code.shutil, "which", lambda _: None)
    assert "C++ compiler" in of(records).text


@pytest.mark.parametrize(
    "changes",
    [
        {"compilation": "eager"},
        {"compilation": "compiled"},
        {"engine_args": {"enforce_eager": False}},
        {"role": Role.POOLING},
    ],
)
def test_the_configuration_decides_if_it_says_which(
    records: CodeRecords, changes: dict[str, Any]
) -> None:
    found = of(records, **changes)
    assert (found.kind, found.missing, found.text) == ("auto", (), "")


def test_two_keys_that_say_which_are_refused() -> None:
    keys = {"worker.compilation": "eager", "worker.engine_args.enforce_eager": True}
    with pytest.raises(ConfigError) as refused:
        load_config(None, keys)
    assert refused.value.field == "worker.compilation"
    assert "enforce_eager" in refused.value.message


def test_a_code_is_of_one_model_machine_and_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in MODEL_DIR.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    copy = replace(PREFILL, model=str(tmp_path))
    keys = {
        key_of(PREFILL),
        key_of(copy),
        key_of(replace(PREFILL, cores=(0, 1))),
        key_of(replace(PREFILL, role=Role.AGGREGATED)),
        key_of(replace(PREFILL, engine_args={"dtype": "float32"})),
        key_of(replace(PREFILL, engine_args={"kv_cache_memory_bytes": 1 << 26})),
    }
    (tmp_path / "config.json").write_text("{}")
    keys.add(key_of(copy))
    monkeypatch.setattr(compiled_code, "cpu_digest", lambda: "another processor")
    keys.add(key_of(PREFILL))
    monkeypatch.undo()
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    keys.add(key_of(PREFILL))
    monkeypatch.undo()
    assert len(keys) == 9
    same = replace(DECODE, worker_id="decode-0", host="localhost", revision="r")
    assert key_of(same) == key_of(PREFILL)


def test_the_oldest_codes_are_removed(
    records: CodeRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_code, "_KEPT", 1)
    record = made(tmp_path)
    records.write("old", record)
    os.utime(tmp_path / "pdserve" / "old.json", (0, 0))
    records.write("new", Record(refused="why"))
    assert records.look("new").refused
    assert [x.name for x in (tmp_path / "pdserve").glob("*.json")] == ["new.json"]
    assert not (tmp_path / "code").exists()


async def test_one_service_makes_code_at_a_time(
    records: CodeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_code, "_LOOK_S", 0.0)
    order = []

    async def second() -> None:
        async with records.turn():
            order.append("second")

    async with records.turn():
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        order.append("first")
    await waiting
    assert order == ["first", "second"]


class Spare:
    """A launcher of processes that end with `code` after their `reports`, or never without a
    code. Notes what it was asked for."""

    def __init__(self, code: int | None, **report: Any) -> None:
        self.code, self.report = code, report
        self.asked: list[str] = []
        self.ended: list[str] = []

    @contextlib.asynccontextmanager
    async def launched(
        self, _log: Path, _config: Path, *, is_worker: bool, code: str
    ) -> AsyncIterator[tuple[Any, asyncio.StreamReader]]:
        assert is_worker
        self.asked.append(code)
        reports = asyncio.StreamReader()
        reports.feed_data(json.dumps(self.report).encode() + b"\n")
        reports.feed_eof()
        try:
            # Its id is that of no process, nor of a group.
            yield SimpleNamespace(pid=2**22 + 1, returncode=self.code, wait=self.wait), reports
        finally:
            self.ended.append(code)

    async def wait(self) -> int:
        if self.code is None:
            await asyncio.Event().wait()
        assert self.code is not None
        return self.code


async def make(spare: Spare, records: CodeRecords, tmp_path: Path) -> str:
    """Make the code of a model. Return what the operator is told."""
    told: list[str] = []
    launcher: Launcher | Any = spare
    display: Any = SimpleNamespace(tell=told.append)
    workers = {"prefill-0": PREFILL, "decode-0": DECODE}
    await SpareCompiler(records, launcher, display, tmp_path).make([of(records)], workers, 0)
    return told[0]


async def test_code_is_recorded_once_it_was_loaded(records: CodeRecords, tmp_path: Path) -> None:
    record = made(tmp_path)
    spare = Spare(0, ready={"files": record.files})
    assert await make(spare, records, tmp_path) == "m: compiled code is made"
    assert spare.asked == spare.ended == ["make", "check"]
    assert records.look(key_of(PREFILL)) == record


@pytest.mark.parametrize(("code", "is_recorded"), [(1, False), (-9, False), (BAD_CONFIG, True)])
async def test_a_failure_is_told_and_a_refusal_recorded(
    records: CodeRecords, tmp_path: Path, code: int, is_recorded: bool
) -> None:
    told = await make(Spare(code, failed="the reason"), records, tmp_path)
    assert told == "m: compiled code is not made: the reason"
    assert records.look(key_of(PREFILL)) == (
        Record(refused="the reason") if is_recorded else Record()
    )


async def test_no_code_is_made_without_memory(
    records: CodeRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = Spare(0)
    monkeypatch.setattr(spare_compiler, "free_bytes", lambda: 1 << 30)
    assert "GiB of memory, and 1.0 are free" in await make(spare, records, tmp_path)
    assert spare.asked == []


async def test_a_process_that_takes_too_much_memory_is_ended(
    records: CodeRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = Spare(None)
    monkeypatch.setattr(spare_compiler, "_LOOK_S", 0.0)
    monkeypatch.setattr(spare_compiler, "_memory_of", lambda _: 9 << 30)
    assert "it took 9.0 GiB of memory" in await make(spare, records, tmp_path)
    assert spare.ended == ["make"]


def starting(records: CodeRecords, tmp_path: Path) -> Any:
    """Return a supervisor whose workers start with compiled code."""
    supervisor: Any = Supervisor.__new__(Supervisor)
    names = ("prefill-0", "decode-0")
    workers = dict(zip(names, (PREFILL, DECODE), strict=True))
    code = decide("m", workers, records)
    supervisor._plan = ServicePlan({}, workers, [], ["m"], Dialer(), "", [code], records)
    supervisor._children = {
        name: SupervisedProcess(name, tmp_path / name, Restarts(1.0), facts={"address": "a"})
        for name in names
    }
    supervisor._display = SimpleNamespace(tell=lambda _: None)
    supervisor._is_serving = False
    return supervisor


def test_all_workers_start_eagerly_if_one_cannot_load_its_code(
    records: CodeRecords, tmp_path: Path
) -> None:
    records.write(key_of(PREFILL), made(tmp_path))
    supervisor = starting(records, tmp_path)
    failed, other = supervisor._children.values()
    failed.failure = "no such kernel"
    assert supervisor._plan.loads_code("prefill-0")
    assert supervisor._runs_eagerly(failed, FAILED)
    assert {x.compilation for x in supervisor._plan.workers.values()} == {"eager"}
    assert (other.begins_anew, other.facts) == (True, {})
    assert records.look(key_of(PREFILL)) == Record()
    assert supervisor._plan.codes[0].missing == (key_of(PREFILL),)
    # It started eagerly, so the next failure has another reason.
    assert not supervisor._runs_eagerly(failed, FAILED)


@pytest.mark.parametrize("has", ["bad configuration", "served"])
def test_other_failures_change_no_kind(records: CodeRecords, tmp_path: Path, has: str) -> None:
    records.write(key_of(PREFILL), made(tmp_path))
    supervisor = starting(records, tmp_path)
    supervisor._is_serving = has == "served"
    code = BAD_CONFIG if has == "bad configuration" else FAILED
    assert not supervisor._runs_eagerly(supervisor._children["decode-0"], code)
    assert supervisor._plan.loads_code("decode-0")
