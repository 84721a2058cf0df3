"""The values of kv_transfer/step.py as vLLM takes them. Tried on vLLM 0.32.0.

vLLM carries them between its processes and looks at their base classes alone, so they are
registered as such and need no vllm themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_transfer.step import (
    Arrival,
    PdHandshake,
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
    Unneeded,
    WorkerOutput,
)

if TYPE_CHECKING:
    from kv_transfer.snapshot import KvSnapshot

__all__ = [
    "Arrival",
    "PdHandshake",
    "SourceEnded",
    "SourceExpected",
    "SourceProgress",
    "StepMetadata",
    "TargetStart",
    "Unneeded",
    "WorkerOutput",
    "handshake_in",
    "snapshot_in",
]


def snapshot_in(_worker: Any) -> KvSnapshot:
    """For `Executor.collective_rpc`: the KV plane of the process that runs this."""
    snapshot: KvSnapshot = get_kv_transfer_group().snapshot()
    return snapshot


def handshake_in(_worker: Any) -> PdHandshake:
    """For `Executor.collective_rpc`: what the process that runs this registers with."""
    handshake: PdHandshake = get_kv_transfer_group().handshake()
    return handshake


KVConnectorHandshakeMetadata.register(PdHandshake)
KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerOutput)
