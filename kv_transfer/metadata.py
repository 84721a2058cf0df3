"""The values of kv_transfer/step.py as vLLM takes them. Tried on vLLM 0.32.0.

vLLM carries them between its processes and looks at their base classes alone, so they are
registered as such and need no vllm themselves.
"""

from __future__ import annotations

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
]

KVConnectorHandshakeMetadata.register(PdHandshake)
KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerOutput)
