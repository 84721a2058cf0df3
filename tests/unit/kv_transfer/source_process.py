"""A source in a process of its own, for tests that stop or kill it: TRANSPORT HALF|INSIDE|READY.

Prints its address once it listens. HALF: two of four blocks are computed and sent, the rest never
comes. INSIDE: prints `inside` when it is in the middle of its first copy, and goes on after a line
on stdin. READY: the transfers "first" and "t" have ended, and nothing more happens.
"""

from __future__ import annotations

import sys
import threading

from kv_transfer.digest import NO_DIGEST
from kv_transfer.memory import KvRegion
from kv_transfer.transport.loopback import LoopbackTransport
from tests.unit.kv_transfer.rig import FROM, N, Rig, by_name

EPOCH = "source process"


def say(line: str) -> None:
    """To the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def hold_copies() -> None:
    """The next copies stand still when half of them is done."""
    copy = KvRegion.copy_from

    def held(
        self: KvRegion,
        source: KvRegion,
        source_ids: list[int],
        own_ids: list[int],
        digests: bool = False,
    ) -> int:
        mark = source.digest(source_ids) if digests else NO_DIGEST
        half = len(own_ids) // 2
        copy(self, source, source_ids[:half], own_ids[:half])
        say("inside")
        sys.stdin.readline()
        copy(self, source, source_ids[half:], own_ids[half:])
        return mark

    KvRegion.copy_from = held  # type: ignore[method-assign]


def main(transport: str, how: str) -> None:
    """Serves until it is killed."""
    if how == "INSIDE":
        hold_copies()
    source = Rig(by_name(transport, LoopbackTransport())).worker(instance_id=EPOCH)
    if how == "READY":
        source.prefill("first", [0, 1], 8)
        source.prefill("t", FROM, N)
        say(source.half.address)
        threading.Event().wait()
    source.expect("t")
    tokens = N if how == "INSIDE" else 8
    source.compute("t", FROM[: -(-tokens // 4)], tokens)
    say(source.half.address)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
