"""What workers cost a router: placements, reports and prefix events, by the size of the fleet.

Half of the workers prefill and half decode; requests are not sent. `place`: choose and reserve
workers for a request, and release them. `retry`: the same after a failure. `full`: a request that
must wait, because no worker has room. `register`: handle the decoded message. `renew`: parse the
frame of a renewal, take it, and pack the answer. `frame`: parse the message of a step that has a
load and 16 tokens. `blocks`: apply a cache update, for each block that is stored or removed. All
are CPU time of the router's own code in one process. Bytes are of the messages, without TCP's.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from pdserve import wire
from pdserve.config import RouterConfig, SloConfig
from pdserve.errors import Unavailable
from pdserve.net import framing
from pdserve.types import (
    Account,
    EngineLimits,
    KvEndpoint,
    KvLedger,
    KvReport,
    ModelInfo,
    Role,
    WorkerInfo,
    WorkerLoad,
)
from pdserve.v1 import worker_pb2 as w
from router.attempt.placer import Placer
from router.attempt.recovery import Constraints, RetryStep
from router.control.adapters import ServedAdapters
from router.control.leases import WorkerLeases
from router.fleet.billing import Billing
from router.fleet.link_pool import LinkPool
from router.fleet.open import OpenedFleet
from router.fleet.prefix_watch import PrefixIndex
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.placement.decisions import DecisionLog
from router.placement.policies import POLICIES
from router.placement.values import Demand
from router.request_path import build_request_path
from workers.link.worker_state import WorkerState, renewal_to_pb

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.progress import Progress

MODEL: Final = ModelInfo("model", "/models/model", 131_072, 128_256, "bfloat16")
LOAD: Final = WorkerLoad(3, 40, 0.6, 9_000, progress=100_000)
CALLS: Final = 200
EVENT_BLOCKS: Final = 64  # a prompt of 1,024 tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", default="2,100,1000,10000", metavar="N,...", help="fleets")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all sizes in alternating rounds. Return rows and notes."""
    fleets = {}
    for size in map(int, args.workers.split(",")):
        progress.step(f"registering {size} workers")
        fleets[size] = _Fleet(size)
    rounds = []
    for number in range(args.rounds + 1):
        progress.step(f"round {number} of {args.rounds}")
        rounds.append({size: each.measured() for size, each in fleets.items()})
    names = next(iter(rounds[0].values()))
    rows = [
        {"workers": size, **each.fixed} | {x: median(y[size][x] for y in rounds[1:]) for x in names}
        for size, each in fleets.items()
    ]
    return rows, ["times in microseconds of CPU"]


class _Fleet:
    """A fleet of a router. `fixed`: figures that do not vary from round to round."""

    def __init__(self, size: int) -> None:
        self._fleet = Fleet(lease_s=1e9, clock=lambda: 0.0)
        self._infos = [_info(i) for i in range(size)]
        began = time.process_time()
        for info in self._infos:
            self._fleet.register(info)
        register_us = (time.process_time() - began) / size * 1e6
        for member in self._fleet.members.values():
            member.attached = True
            member.report_load(LOAD)
        self._full = Fleet(lease_s=1e9, clock=lambda: 0.0)
        for info in self._infos:
            self._full.register(info)
        for member in self._full.members.values():
            member.attached = True
            member.placed.reserved_blocks = member.info.total_blocks
        self._placer, self._full_placer = map(_placer, (self._fleet, self._full))
        metrics, pool = RouterMetrics(SloConfig()), LinkPool(self._fleet, router_id="router")
        workers = OpenedFleet(self._fleet, pool, Billing({}, metrics.count))
        path = build_request_path(RouterConfig(), workers, metrics, {})
        self._leases = WorkerLeases(workers, ServedAdapters(), path.generating)
        self._renewal = _renewal(self._infos[0])
        self._frame = _frame()
        self._index = PrefixIndex(1_000_000)
        self._holder = self._index.join("worker-0")
        self.fixed = {
            "register_us": register_us,
            "renewal_bytes": len(self._renewal),
            "frame_bytes": len(self._frame),
        }

    def measured(self) -> dict[str, float]:
        demand = Demand("model", prompt_tokens=1000, kv_tokens=1250, request_id="r")
        retry = Constraints(RetryStep.PAIR, avoid=frozenset({self._infos[0].worker_id}))
        again = self._placer.reserve_again
        blocks = [random.getrandbits(60) for _ in range(EVENT_BLOCKS)]

        def full() -> None:
            try:
                self._full_placer.reserve(demand)
            except Unavailable:
                return

        def update() -> None:
            self._index.apply(self._holder, (), blocks)
            self._index.apply(self._holder, blocks, ())

        return {
            "place_us": _us(lambda: self._placer.reserve(demand).release()),
            "retry_us": _us(lambda: again(demand, retry, cause="failed").release()),
            "full_us": _us(full),
            "renew_us": _us(self._renew),
            "frame_us": _us(self._read_frame),
            "block_us": _us(update) / (2 * EVENT_BLOCKS),
        }

    def _renew(self) -> None:
        message = w.StepFrame.FromString(self._renewal)
        framing.pack(w.Command(renewed=self._leases.renew(message.renewal)))

    def _read_frame(self) -> None:
        message = w.StepFrame.FromString(self._frame)
        self._fleet.members[self._infos[0].worker_id].report_load(wire.load_from_pb(message.load))


def _us(call: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - began) / CALLS * 1e6


def _placer(fleet: Fleet) -> Placer:
    return Placer(fleet, POLICIES["slo_aware"], log=DecisionLog(1024), prefill_chunks_ahead=2)


def _info(number: int) -> WorkerInfo:
    role = (Role.PREFILL, Role.DECODE)[number % 2]
    return WorkerInfo(
        worker_id=f"{role}-{number}",
        instance_id="1",
        role=role,
        model=MODEL,
        address="10.0.0.1:7000",
        kv=KvEndpoint(("10.0.0.1:7001",), "key", {}, ("tcp",), copies=True),
        block_size=16,
        total_blocks=40_000,
        limits=EngineLimits(256, 8192),
    )


def _renewal(info: WorkerInfo) -> bytes:
    totals = {f"counter_{i}": 1e9 for i in range(12)}
    kv = KvReport(KvLedger(100, 100, 4, 4), links={"tcp": 50}, totals=totals)
    account = Account({"idle": 1.0}, {}, 10.0, 1000.0)
    # Not numbered, so that it can be taken again.
    renewal = renewal_to_pb(info, WorkerState(load=LOAD, kv=kv), account, number=0)
    return w.StepFrame(renewal=renewal).SerializeToString()


def _frame() -> bytes:
    rows = [(i, 1000 + i, "word ") for i in range(16)]
    frame = w.StepFrame(load=wire.load_to_pb(LOAD), tokens=wire.plain_to_pb(rows))
    return frame.SerializeToString()
