"""State that a worker reports to routers with each renewal of its lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.types import ModelWeights
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from pdserve.types import Account, Adapter, KvReport, WorkerInfo, WorkerLoad

_FIRST_WEIGHTS = ModelWeights()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """`kv`: None if the worker transfers no KV. `unhealthy`: fault of the machine, or "".
    `adapters`: usable by requests. `updating`: see WorkerIntake."""

    load: WorkerLoad | None = None
    kv: KvReport | None = None
    is_draining: bool = False
    is_moving: bool = False
    unhealthy: str = ""
    adapters: tuple[Adapter, ...] = ()
    gpus: tuple[w.GpuHealth, ...] = ()
    weights: ModelWeights = _FIRST_WEIGHTS
    updating: str = ""


def renewal_to_pb(
    info: WorkerInfo, state: WorkerState, account: Account, number: int
) -> w.RenewRequest:
    """`number`: grows with each renewal of this worker."""
    return w.RenewRequest(
        worker_id=info.worker_id,
        instance_id=info.instance_id,
        load=None if state.load is None else wire.load_to_pb(state.load),
        kv=None if state.kv is None else wire.kv_report_to_pb(state.kv),
        draining=state.is_draining,
        moving=state.is_moving,
        unhealthy=state.unhealthy,
        adapters=map(wire.adapter_to_pb, state.adapters),
        gpus=state.gpus,
        account=wire.account_to_pb(account),
        weights=wire.weights_to_pb(state.weights),
        updating=state.updating,
        number=number,
    )


def registration_to_pb(info: WorkerInfo, state: WorkerState) -> w.RegisterRequest:
    return w.RegisterRequest(
        worker=wire.worker_to_pb(info),
        draining=state.is_draining,
        adapters=map(wire.adapter_to_pb, state.adapters),
        weights=wire.weights_to_pb(state.weights),
        updating=state.updating,
    )
