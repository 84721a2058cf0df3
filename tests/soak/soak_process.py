"""A worker of the soak test as a process: SPEC, a JSON object, see soak_peer.py.

Commands come as JSON lines on stdin, events go as JSON lines to stdout; the first is `ready`. It
ends when stdin does, and dies with the process that started it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_transfer import target as tgt
from kv_transfer.digest import NO_DIGEST
from kv_transfer.memory import KvRegion
from kv_transfer.messages import Ack
from kv_transfer.settings import from_extra_config
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.tcp import TcpTransport
from pdserve.child import die_with
from tests.soak.soak_engine import Broken, Decode, Prefill, SoakEngine
from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.rig import Worker, open_files, own_threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_transfer.link import Link
    from kv_transfer.transport.base import (
        LocalKv,
        SourceChannel,
        Transport,
        Wire,
    )

BLOCKS = 256
_TICK_S = 0.005
_CLOSE_S = 60.0


class Slow:
    """A transport whose pushes wait at random, mostly not, sometimes for long."""

    def __init__(self, inner: Transport, rng: random.Random, odds: float) -> None:
        self.name = inner.name
        self._inner = inner
        self._rng = rng
        self._odds = odds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        channel = self._inner.source(local, offer, wire)
        push = channel.push

        def delayed(*chunk: Any) -> None:
            if self._rng.random() < self._odds:
                time.sleep(self._rng.choice((0.005, 0.02, 0.1)))
            push(*chunk)

        channel.push = delayed  # type: ignore[method-assign]
        return channel


def linger_in_copies(rng: random.Random, odds: float) -> None:
    """Some copies into another's memory stand still when half of them is done: longer than a target
    waits before it gives the link up."""
    copy = KvRegion.copy_from

    def lingering(
        self: KvRegion,
        source: KvRegion,
        source_ids: list[int],
        own_ids: list[int],
        digests: bool = False,
    ) -> int:
        if rng.random() >= odds:
            return copy(self, source, source_ids, own_ids, digests)
        half = len(own_ids) // 2
        mark = source.digest(source_ids) if digests else NO_DIGEST
        copy(self, source, source_ids[:half], own_ids[:half])
        time.sleep(rng.choice((0.005, 0.05, 0.6)))
        copy(self, source, source_ids[half:], own_ids[half:])
        return mark

    KvRegion.copy_from = lingering  # type: ignore[method-assign]


class LateAcks:
    """Holds some acknowledgements back for a while."""

    def __init__(self, worker: Worker, rng: random.Random, odds: float) -> None:
        self._rng = rng
        self._held: list[tuple[float, Link, Ack]] = []
        links = worker.half.links
        do_target = links.do_target

        def do(actions: Iterable[tgt.TargetAction[Link]]) -> None:
            rest = []
            for action in actions:
                if isinstance(action, tgt.SendAck) and rng.random() < odds:
                    until = time.monotonic() + self._rng.choice((0.02, 0.2, 1.5))
                    self._held.append((until, action.link, Ack(action.transfer_id)))
                else:
                    rest.append(action)
            do_target(rest)

        links.do_target = do  # type: ignore[method-assign]

    def tick(self) -> None:
        """Sends those whose time has come."""
        now = time.monotonic()
        due, self._held = (
            [x for x in self._held if x[0] <= now],
            [x for x in self._held if x[0] > now],
        )
        for _, link, ack in due:
            link.send(ack)

    def __bool__(self) -> bool:
        return bool(self._held)


class SoakProcess:
    """Owns the worker; runs commands and steps on the main thread."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._fds = open_files()
        rng, odds = random.Random(spec["seed"]), spec["odds"]
        linger_in_copies(rng, odds)
        known: dict[str, Transport] = {"shm": ShmTransport(), "tcp": TcpTransport()}
        self._worker = Worker(
            instance_id=spec["instance_id"],
            transports=[Slow(known[name], rng, odds) for name in spec["transports"]],
            shape=geometry(layers=2, blocks=BLOCKS, page=512),
            settings=from_extra_config(spec["settings"]),
        )
        self._acks = LateAcks(self._worker, rng, odds)
        self._engine = SoakEngine(self._worker)
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._worker.half.wake_with(self._wake.set)
        threading.Thread(target=self._read, daemon=True, name="commands").start()

    def run(self) -> None:
        """Until stdin ends or `close` comes."""
        say({"event": "ready", "address": self._worker.half.address})
        while True:
            self._wake.wait(_TICK_S if self._engine.is_busy or self._acks else None)
            self._wake.clear()
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                if command["do"] == "close":
                    self._close()
                    return
                self._obey(command)
            self._acks.tick()
            self._engine.step()
            for event in self._engine.events:
                say(event)
            self._engine.events.clear()

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
            self._wake.set()
        self._commands.put(None)
        self._wake.set()

    def _obey(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "prefill":
                self._engine.prefill(Prefill(**command))
            case "decode":
                self._engine.decode(Decode(**command))
            case "abort_prefill":
                self._engine.abort_prefill(command["transfer_id"])
            case "abort_decode":
                self._engine.abort_decode(command["transfer_id"])
            case "status":
                say({"event": "status", **self._status()})

    def _status(self) -> dict[str, Any]:
        self._engine.check_free_blocks()
        links = self._worker.half.links
        seen = links.snapshot()
        with links.lock:
            tombstones = len(links.sources._tombstones)
        return {
            **self._engine.ledger(),
            "is_empty": self._worker.is_empty,
            "transfers": len(seen.transfers),
            "quarantined": seen.quarantined_slots,
            "links": [[link.state, link.peer_instance_id, link.transport] for link in seen.links],
            "tombstones": tombstones,
            "mapped_caches": mapped("test-kv"),
            "mapped_boards": mapped("pdserve-kv-board"),
            "totals": dict(seen.totals),
        }

    def _close(self) -> None:
        """Takes the worker down and says what is left of it."""
        self._worker.close()
        end = time.monotonic() + _CLOSE_S
        while own_threads() and time.monotonic() < end:
            time.sleep(0.005)
        say(
            {
                "event": "closed",
                "threads": [x.name for x in own_threads()],
                "descriptors": open_files() - self._fds,
                "shared_memory": own_maps().count("memfd:"),
            }
        )


def own_maps() -> str:
    """What is mapped into this process."""
    return Path("/proc/self/maps").read_text(encoding="utf-8")


def mapped(name: str) -> int:
    """How many pieces of shared memory of that name are."""
    return len(set(re.findall(rf" (\d+) +/memfd:{name}\b", own_maps())))


def say(event: dict[str, Any]) -> None:
    """To the driver."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main(spec: dict[str, Any]) -> None:
    """See the top of the file."""
    die_with(spec["parent"])
    # Every refusal and every link that goes down would be told.
    logging.disable(logging.WARNING)
    try:
        SoakProcess(spec).run()
    except Broken as error:
        say({"event": "broken", "reason": str(error)})
        os._exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
