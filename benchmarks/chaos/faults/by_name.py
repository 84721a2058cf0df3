"""Every row by its name, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.chaos.faults.aborts import ABORT_STORM
from benchmarks.chaos.faults.clocks import CLOCK_JUMP
from benchmarks.chaos.faults.disks import DISK_FULL
from benchmarks.chaos.faults.freezes import EXPIRED_KV_LEASE, FREEZE_DECODE, FREEZE_PREFILL
from benchmarks.chaos.faults.kills import KILL_ALL, KILL_ALL_DECODE, KILL_DECODE, KILL_PREFILL
from benchmarks.chaos.faults.leases import EXPIRED_LEASE, OLD_EPOCH
from benchmarks.chaos.faults.readers import SLOW_CLIENTS
from benchmarks.chaos.faults.restarts import ROLLING_RESTART
from benchmarks.chaos.faults.router_kill import KILL_OF_TWO, ROUTER_KILL
from benchmarks.chaos.faults.transfers import CORRUPT, CORRUPT_TCP, DELAY, DROP, DROP_TCP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.chaos.scene import Fault

_ALL: Final[tuple[Fault, ...]] = (
    *(KILL_PREFILL, KILL_DECODE, FREEZE_PREFILL, FREEZE_DECODE, DROP, DELAY, CORRUPT),
    *(ABORT_STORM, SLOW_CLIENTS, CLOCK_JUMP, DISK_FULL, EXPIRED_LEASE, EXPIRED_KV_LEASE),
    *(OLD_EPOCH, KILL_ALL_DECODE, KILL_ALL, ROUTER_KILL),
    *(KILL_OF_TWO, ROLLING_RESTART, DROP_TCP, CORRUPT_TCP),
)
FAULTS: Final[Mapping[str, Fault]] = {fault.name: fault for fault in _ALL}

_Changes = tuple[tuple[str, Any], ...]
_TWO_ROUTERS: Final[_Changes] = (("up.routers", 2),)
_TCP: Final[_Changes] = (("worker.kv.transports", ["tcp"]),)
_OF: Final[Mapping[str, _Changes]] = {
    KILL_OF_TWO.name: _TWO_ROUTERS,
    ROLLING_RESTART.name: _TWO_ROUTERS,
    DROP_TCP.name: _TCP,
    CORRUPT_TCP.name: _TCP,
}


def changes_of(fault: Fault) -> _Changes:
    """The configuration keys that a row sets beside those of all; it has a service of its own
    then, together with the rows beside it that set the same."""
    return _OF.get(fault.name, ())
