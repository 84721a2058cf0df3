"""A worker process as the soak test holds it: started, killed, frozen, and started again under a
new instance id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.capability import CapabilityKey, WorkerStart

from tests.patience import WAIT_S

ROOT = Path(__file__).parents[2]
# Short, so that every deadline passes many times over; none is waited for where nothing is wrong.
SETTINGS = {
    "lease_s": 1.0,
    "receive_timeout_s": 1.0,
    "cancel_timeout_s": 0.3,
    "handshake_timeout_s": 1.0,
    "send_timeout_s": 1.0,
    "chunk_bytes": 2048,  # two blocks
}


@dataclass(eq=False)
class Peer:
    """One worker through all its lives. `life` counts them; commands to a frozen one wait here, for
    its pipe holds only so much. `odds` are those of each push, copy and acknowledgement to be late.
    """

    name: str
    transports: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    odds: float = 0.03
    life: int = 0
    address: str = ""
    is_frozen: bool = False

    def start(self, seed: int) -> None:
        """Begins the next life; `ready` comes as an event."""
        self.life += 1
        self.instance_id = f"{self.name}-{self.life}"
        self.key = CapabilityKey.generate()
        self.address, self.is_frozen = "", False
        self._unread, self._unsent = b"", list[bytes]()
        spec = {
            "instance_id": self.instance_id,
            "transports": self.transports,
            "seed": seed,
            "odds": self.odds,
            "parent": os.getpid(),
            "settings": {
                **SETTINGS,
                **self.settings,
                "worker_id": self.name,
                "kv_key": self.key.reveal().hex(),
            },
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.soak_process", json.dumps(spec)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def start_of(self) -> WorkerStart:
        """This life, as capabilities name it."""
        return WorkerStart(self.name, self.instance_id)

    @property
    def fd(self) -> int:
        """To wait on, and to `read` when there is something."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def tell(self, do: str, **values: Any) -> None:
        """A command, see soak_process.py."""
        self._unsent.append(json.dumps({"do": do, **values}).encode() + b"\n")
        if not self.is_frozen:
            self._flush()

    def read(self) -> list[dict[str, Any]]:
        """Events that are there; at least one read's worth. Raises EOFError when it has ended."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            raise EOFError(f"{self.instance_id} ended by itself")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """SIGKILL, and every trace of the process collected. Idempotent."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(WAIT_S)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT; what it was told meanwhile follows."""
        self._process.send_signal(signal.SIGCONT)
        self.is_frozen = False
        self._flush()

    def _flush(self) -> None:
        assert self._process.stdin is not None
        for line in self._unsent:
            self._process.stdin.write(line)
        self._process.stdin.flush()
        self._unsent.clear()
