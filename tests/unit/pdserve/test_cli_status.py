"""What `pdserve status` makes of the answers of routers and workers."""

from __future__ import annotations

from pdserve import wire
from pdserve.cli import status
from pdserve.types import KvLedger, KvReport
from pdserve.v1 import worker_pb2 as w


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
