"""Every row by its name, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.chaos.faults.aborts import ABORT_STORM
from benchmarks.chaos.faults.clocks import CLOCK_JUMP
from benchmarks.chaos.faults.disks import DISK_FULL
from benchmarks.chaos.faults.freezes import EXPIRED_KV_LEASE, FREEZE_DECODE, FREEZE_PREFILL
from benchmarks.chaos.faults.kills import KILL_DECODE, KILL_PREFILL
from benchmarks.chaos.faults.leases import EXPIRED_LEASE, OLD_EPOCH
from benchmarks.chaos.faults.readers import SLOW_CLIENTS
from benchmarks.chaos.faults.router_kill import ROUTER_KILL
from benchmarks.chaos.faults.transfers import CORRUPT, DELAY, DROP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.chaos.scene import Fault

_ALL: Final[tuple[Fault, ...]] = (
    *(KILL_PREFILL, KILL_DECODE, FREEZE_PREFILL, FREEZE_DECODE, DROP, DELAY, CORRUPT),
    *(ABORT_STORM, SLOW_CLIENTS, CLOCK_JUMP, DISK_FULL, EXPIRED_LEASE, EXPIRED_KV_LEASE),
    *(OLD_EPOCH, ROUTER_KILL),
)
FAULTS: Final[Mapping[str, Fault]] = {fault.name: fault for fault in _ALL}
