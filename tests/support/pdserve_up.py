"""A `pdserve up` process: start it, read its lines, and check that its processes end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.commands import ROOT
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    import http.client
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# Long enough that no pause of a busy machine expires a lease. Not longer, because the workers of a
# restarted router notice it after a third of this.
LEASE_S = 20.0
# Starts a session with the terminal on its standard input, then executes `pdserve`.
_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class UpProcess:
    """The process and its children. `close` ends them all."""

    def __init__(
        self,
        directory: Path,
        *args: str,
        terminal: bool = False,
        command: str = "up",
        python: str = sys.executable,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        compiles: bool = False,
    ) -> None:
        """`compiles`: workers may run compiled code, and a spare process makes it. Without it, no
        test runs another kind of code than the one before."""
        self.ready_path = directory / "ready.json"
        self._heard = threading.Condition()
        self._lines: list[str] = []
        self._taken: set[int] = set()
        self._has_ended = False
        options = ["--ready-file", str(self.ready_path), "--run-dir", str(directory / "run")]
        options += ["--set", f"router.lease_s={LEASE_S}"]
        options += ["--set", f"router.health.stall_s={LEASE_S}"]
        if not compiles:
            options += ["--set", "worker.compilation=eager"]
        words = ["-m", "pdserve", command, *options, *args]
        if terminal:
            self._terminal, stdin = os.openpty()
            words = ["-c", _ON_TERMINAL, *words]
        else:
            self._terminal, stdin = -1, subprocess.DEVNULL
        self.process = subprocess.Popen(
            [python, *words],
            cwd=cwd,
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if terminal:
            os.close(stdin)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._pidfds: dict[int, int] = {}

    def wait_for_line(self, *words: str, within_s: float = WAIT_S) -> str:
        """Wait for a line that contains all of `words` and return it, each line once. Earlier lines
        count, because processes that start together write in any order."""
        ends_at = time.monotonic() + within_s
        with self._heard:
            while True:
                for number, line in enumerate(self._lines):
                    if number not in self._taken and all(word in line for word in words):
                        self._taken.add(number)
                        return line
                said = "".join(self._lines)
                assert not self._has_ended, f"it ended before saying {words}:\n{said}"
                left_s = ends_at - time.monotonic()
                assert left_s > 0, f"it did not say {words} in {within_s} s:\n{said}"
                self._heard.wait(left_s)

    def wait_until_serving(self, *, within_s: float = WAIT_S) -> dict[str, Any]:
        """Wait until everything is ready. Return the content of the ready file and watch its
        processes."""
        self.wait_for_line("Ctrl-C stops it", within_s=within_s)
        ready: dict[str, Any] = json.loads(self.ready_path.read_text())
        self.watch([process["pid"] for process in (*ready["routers"], *ready["workers"])])
        return ready

    def watch(self, pids: Sequence[int]) -> None:
        """Keep handles of these processes, so that a reused process id is not taken for them."""
        self._pidfds |= {pid: os.pidfd_open(pid) for pid in pids}

    def watch_children(self) -> list[int]:
        """Watch the current children of the supervisor."""
        pids = [child.pid for child in psutil.Process(self.process.pid).children()]
        self.watch(pids)
        return pids

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor only."""
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """Send Ctrl-C as a terminal does: to all processes in the foreground."""
        os.write(self._terminal, b"\x03")

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def survivors(self, *, within_s: float = WAIT_S) -> list[int]:
        """Wait up to `within_s` for the watched processes to end. Return those still running."""
        alive = dict(self._pidfds)
        while alive:
            ready, _, _ = select.select(list(alive.values()), [], [], within_s)
            if not ready:
                break
            alive = {pid: fd for pid, fd in alive.items() if fd not in ready}
        return sorted(alive)

    @property
    def output(self) -> str:
        """Return all output read so far."""
        with self._heard:
            return "".join(self._lines)

    def close(self) -> None:
        """Kill the remaining processes by process id, and release everything."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        for pid, fd in self._pidfds.items():
            if not select.select([fd], [], [], 0)[0]:
                os.kill(pid, signal.SIGKILL)
            os.close(fd)
        if self._terminal >= 0:
            os.close(self._terminal)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self._lines.append(line)
                self._heard.notify_all()
        with self._heard:
            self._has_ended = True
            self._heard.notify_all()


@contextlib.contextmanager
def up(directory: Path, *args: str, terminal: bool = False) -> Iterator[UpProcess]:
    """Run `pdserve up` on free ports with fake engines and a policy that does not learn, unless
    `args` override this."""
    policy = ("--set", "router.policy=least_loaded")
    defaults = ("--engine", "fake", "--http-port", "0", "--grpc-port", "0", *policy)
    running = UpProcess(directory, *defaults, *args, terminal=terminal)
    try:
        yield running
    finally:
        running.close()


def ask(url: str, *, model: str = "pdserve-demo", max_tokens: int = 8) -> http.client.HTTPResponse:
    """Send a streamed chat request. Return the response, whose body is not read yet."""
    question = {"role": "user", "content": "What is a block?"}
    body = {
        "model": model,
        "messages": [question],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=WAIT_S)
    return response
