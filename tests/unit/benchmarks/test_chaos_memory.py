"""What a soak says of the memory of its processes."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.chaos.memory import (
    JUDGED_S,
    STEEPEST,
    Growth,
    Memory,
    Weight,
    kv_caches,
    too_steep,
    weigh,
)
from benchmarks.chaos.soak import SoakResult
from kv_transfer.memory import SharedMemory
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def samples(*, mib: Callable[[int], float], shared_mib: float = 0.0) -> Iterator[Weight]:
    for second in range(120):
        private = int(mib(second) * (1 << 20))
        yield Weight(private + int(shared_mib * second * (1 << 20)), private)


def test_each_life_has_its_own_slope_behind_its_warm_up() -> None:
    memory = Memory()
    lives = {
        ("grows", 1): samples(mib=lambda second: 50.0 + second),
        ("warms up", 2): samples(mib=lambda second: min(40, second)),
        ("jumps", 3): samples(mib=lambda second: 500.0 if second % 10 == 0 else 30.0),
        ("maps what others share", 4): samples(mib=lambda second: 30.0, shared_mib=1.0),
    }
    for (name, pid), weights in lives.items():
        for second, weight in enumerate(weights):
            memory.take(name, pid, float(second), weight)
    # Three lives of one worker, none of which grows: together they would.
    for second in range(120):
        life = second // 40
        memory.take("killed", 5 + life, float(second), Weight(life << 30, life << 30))
    told, short = memory.growths(120.0)
    assert {x.name: x.private_mib_per_h for x in told} == {
        "grows": 3600.0,
        "warms up": 0.0,
        "jumps": 0.0,
        "maps what others share": 0.0,
    }
    assert {x.name: x.resident_mib_per_h for x in told}["maps what others share"] == 3600.0
    assert told[0].private_mib == (92.0, 167.0)
    assert (told[0].since_s, told[0].seconds) == (40.0, 79.0)
    assert short == {"killed": 3}


def test_a_long_run_is_not_passed_by_a_process_that_grows() -> None:
    def growth(name: str, slope: float) -> Growth:
        return Growth(
            name=name,
            pid=1,
            since_s=600.0,
            seconds=900.0,
            private_mib=(1.0, 2.0),
            resident_mib=(1.0, 2.0),
            private_mib_per_h=slope,
            resident_mib_per_h=9 * STEEPEST,
        )

    growths = [growth("router", STEEPEST + 1), growth("up", STEEPEST), growth("decode-0", -200.0)]
    assert too_steep(growths, JUDGED_S - 1) == []
    assert [text.split()[0] for text in too_steep(growths, JUDGED_S)] == ["router"]
    result = SoakResult(created="", engine="fake", workers="2P2D", model="m", host={})
    assert result.passed
    result.grew, result.memory = too_steep(growths, JUDGED_S), growths
    result.short_lives["decode-1"] += 2
    assert not result.passed
    written = json.loads(json.dumps(result.to_json()))
    assert written["memory"][0]["private_mib_per_h"] == STEEPEST + 1
    assert written["short_lives"] == {"decode-1": 2}


def test_memory_is_private_where_no_other_process_can_map_it() -> None:
    pid, size = os.getpid(), 32 << 20
    before, caches = weigh(pid, alone=True), kv_caches([pid])
    assert before is not None
    shared = SharedMemory("pdserve-kv")
    try:
        shared.grow(size)
        with mmap.mmap(shared.fd, size) as mapped:
            mapped[:] = bytes(size)
            meanwhile = weigh(pid, alone=True)
            assert meanwhile is not None
            assert kv_caches([pid]) - caches == {str(shared.inode)}
    finally:
        shared.close()
    assert meanwhile.resident - before.resident >= size * 0.9
    assert meanwhile.private - before.private < size / 2
    assert kv_caches([pid]) == caches
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(WAIT_S)
    assert weigh(gone.pid, alone=False) is None
