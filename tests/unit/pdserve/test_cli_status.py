"""What `pdserve status` makes of the answers of routers and workers."""

from __future__ import annotations

import io

import grpc.aio
from rich.console import Console

from pdserve import wire
from pdserve.cli import build_parser, status
from pdserve.net.rpc import PLAIN
from pdserve.types import KvLedger, KvReport
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryServicer, add_RegistryServicer_to_server
from tests.support.timeouts import WAIT_S


def row(name: str, **labels: str) -> dict[str, object]:
    info = w.WorkerInfo(worker_id=name, role=w.ROLE_DECODE, topology=labels)
    return status_row(w.WorkerEntry(info=info, state="ready"))


def status_row(entry: w.WorkerEntry) -> dict[str, object]:
    return status._row(entry, w.WorkerStatus(ledger=w.KvLedger()))


def test_revisions_are_shown_with_their_share_where_there_are_weights() -> None:
    info = w.WorkerInfo(worker_id="d0", role=w.ROLE_DECODE, revision="r2")
    rows = [
        status_row(w.WorkerEntry(info=info, revision_share=0.05)),
        status_row(w.WorkerEntry(info=info)),
    ]
    table = status.load_table("workers", [*rows, row("d1")])
    assert list(table.columns[1].cells) == ["r2 5%", "r2", ""]
    assert table.columns[1].header == "revision"


def test_workers_are_shown_with_their_labels_where_one_has_any() -> None:
    rows = [row("d0", zone="a", region="eu"), row("d1")]
    console = Console(file=io.StringIO(), width=160)
    for shown in (rows, rows[1:]):
        console.print(status.load_table("workers", shown))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("where") == 1
    assert "eu/a" in text


def test_workers_on_cpus_are_shown_with_how_they_run_the_model() -> None:
    rows = [
        {"worker_id": name, "settings": {"device": device, "enforce_eager": is_eager}}
        for name, device, is_eager in (
            ("p0", "cpu", "True"),
            ("d0", "cpu", "True"),
            ("d1", "cpu", "False"),
            ("g0", "cuda", "False"),
        )
    ]
    found = status._kinds([*rows, {"worker_id": "fake"}])
    assert found == ["p0, d0: eagerly", "d1: with compiled code"]


async def test_a_worker_that_keeps_dying_is_not_asked_and_shown_in_its_state() -> None:
    info = w.WorkerInfo(worker_id="d0", role=w.ROLE_DECODE, address="127.0.0.1:1")
    entry = w.WorkerEntry(info=info, state="crash-looping", reason="killed by signal 9")
    reason = await status._ask(PLAIN, entry, 1.0)
    assert reason == "killed by signal 9"
    table = status.load_table("workers", [status._row(entry, reason)])
    assert list(table.columns[2].cells) == ["crash-looping"]
    assert status._unpaired([entry]) == []


def test_pairs_that_use_a_slower_transport_are_named_by_their_workers() -> None:
    reports = {"decode-0": {"prefill-0-1f": "tcp; not shm: why", "gone-2e": "tcp"}, "prefill-0": {}}
    rows = []
    for name, downgrades in reports.items():
        info = w.WorkerInfo(worker_id=name, instance_id=f"{name}-1f", role=w.ROLE_DECODE)
        kv = wire.kv_report_to_pb(KvReport(KvLedger(), downgrades=downgrades))
        rows.append(
            status._row(w.WorkerEntry(info=info), w.WorkerStatus(kv=kv, ledger=w.KvLedger()))
        )
    assert status._slower_kv(rows) == [
        {"prefill": "gone-2e", "decode": "decode-0", "reason": "tcp"},
        {"prefill": "prefill-0", "decode": "decode-0", "reason": "tcp; not shm: why"},
    ]


class Registry(RegistryServicer):
    """Serve a router with these workers."""

    def __init__(self, *entries: w.WorkerEntry) -> None:
        self._entries = entries

    async def ListWorkers(  # noqa: N802
        self, request: w.ListWorkersRequest, context: object
    ) -> w.ListWorkersResponse:
        return w.ListWorkersResponse(workers=self._entries)


async def test_a_worker_that_left_is_neither_asked_nor_listed() -> None:
    entries = [
        w.WorkerEntry(
            info=w.WorkerInfo(worker_id=state, role=w.ROLE_DECODE, address="127.0.0.1:1"),
            state=state,
        )
        for state in ("left", "lost")
    ]
    server = grpc.aio.server()
    add_RegistryServicer_to_server(Registry(*entries), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        args = build_parser().parse_args(["status", "--grpc", f"127.0.0.1:{port}"])
        found = await status.collect(args, WAIT_S)
    finally:
        await server.stop(0)
    assert [(x["worker_id"], x["answers"]) for x in found["workers"]] == [("lost", False)]
