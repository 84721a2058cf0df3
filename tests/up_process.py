"""A `pdserve up` as a process of its own: started, read line by line, and accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A router must not lose a worker that a busy machine has only stopped for a moment; and a router
# that is started again waits a third of this for its workers to notice.
LEASE_S = 20.0
ROOT = Path(__file__).resolve().parents[1]
# Gives a process its own session with the terminal on its standard input, then becomes `pdserve`.
_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_cli(
    *args: str, stdin: str = "", within_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *args],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


def run(
    *command: object,
    within_s: float = WAIT_S,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its good end and return what it prints."""
    words = [str(word) for word in command]
    ended = subprocess.run(
        words,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-8000:]
    return ended.stdout


def copy_sources(into: Path) -> None:
    """Copy the files of this checkout that git does not ignore."""
    listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    for name in filter(lambda x: (ROOT / x).is_file(), listed.splitlines()):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, into / name)


class UpProcess:
    """Owns the process and whatever it started; `close` leaves none of them."""

    def __init__(
        self,
        directory: Path,
        *args: str,
        terminal: bool = False,
        command: str = "up",
        python: str = sys.executable,
        cwd: Path = ROOT,
    ) -> None:
        self.ready_path = directory / "ready.json"
        self._heard = threading.Condition()
        self._lines: list[str] = []
        self._taken: set[int] = set()
        self._has_ended = False
        options = ["--ready-file", str(self.ready_path), "--run-dir", str(directory / "run")]
        options += ["--set", f"router.lease_s={LEASE_S}"]
        options += ["--set", f"router.health.stall_s={LEASE_S}"]
        words = ["-m", "pdserve", command, *options, *args]
        if terminal:
            self._terminal, stdin = os.openpty()
            words = ["-c", _ON_TERMINAL, *words]
        else:
            self._terminal, stdin = -1, subprocess.DEVNULL
        self.process = subprocess.Popen(
            [python, *words],
            cwd=cwd,
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
        """The first line that holds all of `words` and that was not returned before, said already
        or still to come: processes that start together speak in any order."""
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
        """What the ready file says, once everything is ready; its processes are watched."""
        self.wait_for_line("Ctrl-C stops it", within_s=within_s)
        ready: dict[str, Any] = json.loads(self.ready_path.read_text())
        self.watch([process["pid"] for process in (*ready["routers"], *ready["workers"])])
        return ready

    def watch(self, pids: Sequence[int]) -> None:
        """Hold on to these processes, so that their end can be told from another's beginning."""
        self._pidfds |= {pid: os.pidfd_open(pid) for pid in pids}

    def watch_children(self) -> list[int]:
        """Watch what runs under the supervisor now."""
        pids = [child.pid for child in psutil.Process(self.process.pid).children()]
        self.watch(pids)
        return pids

    def send(self, number: signal.Signals) -> None:
        """Signal the supervisor alone."""
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """What a person does: the terminal signals everything in the foreground."""
        os.write(self._terminal, b"\x03")

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def survivors(self, *, within_s: float = WAIT_S) -> list[int]:
        """Which of the watched processes are still there after `within_s` at the most."""
        alive = dict(self._pidfds)
        while alive:
            ready, _, _ = select.select(list(alive.values()), [], [], within_s)
            if not ready:
                break
            alive = {pid: fd for pid, fd in alive.items() if fd not in ready}
        return sorted(alive)

    @property
    def output(self) -> str:
        """All that it said and that was read so far."""
        with self._heard:
            return "".join(self._lines)

    def close(self) -> None:
        """Kill what is left, by process id, and take everything back."""
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
    """`pdserve up` on free ports with fake engines and a policy that does not learn, unless `args`
    say otherwise."""
    policy = ("--set", "router.policy=least_loaded")
    defaults = ("--engine", "fake", "--http-port", "0", "--grpc-port", "0", *policy)
    running = UpProcess(directory, *defaults, *args, terminal=terminal)
    try:
        yield running
    finally:
        running.close()
