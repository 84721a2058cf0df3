"""Processes forked from a parent that has imported something already."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.process.forkserver import ForkFailed, ForkServer
from tests.support.commands import ROOT
from tests.support.timeouts import WAIT_S, wait_until
from workers.main import thread_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

# Uses a fork server. Its parent writes whether it has imported the module, and its process id.
USER = """
import asyncio, os, sys
from pathlib import Path
from pdserve.process.forkserver import ForkServer

def preload(path):
    Path(path).write_text(f"{'tabnanny' in sys.modules} {os.getpid()}")

async def main(path, is_closed):
    server = ForkServer("user:preload", arguments=(path,))
    done = await server.start("timeit", "-n", "1", "pass", env=os.environ)
    assert await done.wait() == 0
    for _ in range(2 if is_closed else 0):
        server.close()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "closed"))
"""

# Forks itself, and the fork runs a module that writes what it has imported, and its parent.
SELF = """
import os, sys, threading, time
from pathlib import Path
from pdserve.process.forkserver import exit_code_from, fork_from, serve_forks

def named(name, is_named):
    Path("/proc/thread-self/comm").write_text(name)
    is_named.set()
    time.sleep(60)

for name in sys.argv[1:]:
    is_named = threading.Event()
    threading.Thread(target=named, args=(name, is_named), daemon=True).start()
    is_named.wait()
import tabnanny
server = serve_forks()
pid, answers = fork_from(server, "said", (), os.environ, 2, ())
print(os.getpid(), exit_code_from(answers), flush=True)
"""
SAID = """
import os, sys
print('tabnanny' in sys.modules, os.getppid(), flush=True)
sys.exit(3)
"""

# An executed process, which does not end, has a module run in a fork of another's fork server. The
# fork writes to its standard error.
CLIENT = """
import asyncio, sys
from pdserve.process.forkserver import start_own, use_server

async def main():
    use_server(int(sys.argv[1]))
    assert await start_own("forked", fds=()) is not None
    await asyncio.sleep(600)

asyncio.run(main())
"""
FORKED = """
import os, sys, time
from pdserve.process import forkserver

print('tabnanny' in sys.modules, forkserver._own_server, os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    made = ForkServer("os:getpid", tmp_path / "log")
    yield made
    made.close()


async def test_a_fork_runs_a_module_and_reports_its_end(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "fork.log"
    done = await server.start("timeit", "-n", "1", "pass", env=os.environ, log=log)
    assert await done.wait() == 0
    assert "1 loop" in log.read_text()
    with pytest.raises(ProcessLookupError):
        done.kill()
    killed = await server.start("timeit", "import time; time.sleep(60)", env=os.environ)
    killed.kill()
    assert await killed.wait() == -signal.SIGKILL


async def test_a_preload_that_fails_is_reported(tmp_path: Path) -> None:
    server = ForkServer("no_such_module:f", tmp_path / "log")
    with pytest.raises(ForkFailed):
        await server.start("timeit", env=os.environ)
    assert "no_such_module" in (tmp_path / "log").read_text()
    server.close()


async def test_numpy_starts_no_threads_before_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in thread_environment((0, 1)):  # as in a worker with two cores
        monkeypatch.setenv(name, "2")
    server = ForkServer("numpy:array", tmp_path / "log", arguments=("1",))
    done = await server.start("timeit", "-n", "1", "pass", env=os.environ)
    assert await done.wait() == 0
    server.close()


@pytest.mark.parametrize("end", ["closed", "left"])
async def test_a_forked_process_forks_from_what_its_own_server_has_imported(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer("importlib:import_module", tmp_path / "log", arguments=("tabnanny",))
    user = await server.start("user", str(tmp_path / "said"), end, env=os.environ)
    assert await user.wait() == 0, (tmp_path / "log").read_text()
    has_imported, pid = (tmp_path / "said").read_text().split()
    assert has_imported == "True"
    # It ends with its user.
    await wait_until(lambda: not Path("/proc", pid).exists())
    server.close()


async def test_a_process_forks_itself_and_the_fork_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SELF)
    (tmp_path / "said.py").write_text(SAID)
    # Threads of libraries that expect forks are no loss.
    found = await _run_python(tmp_path / "own.py", "cuda00001800007", "jemalloc_bg_thd")
    has_imported, parent, user, code = found.split()
    assert (has_imported, code) == ("True", "3")
    assert parent != user
    await wait_until(lambda: not Path("/proc", parent).exists())


async def test_an_executed_process_has_a_module_run_in_a_fork_that_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "forked.py").write_text(FORKED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))
    server = ForkServer("importlib:import_module", tmp_path / "log", arguments=("tabnanny",))
    with server.new_client() as client:
        user = await asyncio.create_subprocess_exec(
            sys.executable,
            tmp_path / "client.py",
            str(client.fileno()),
            pass_fds=(client.fileno(),),
            stderr=asyncio.subprocess.PIPE,
        )
    assert user.stderr is not None
    has_imported, own_server, pid = (await user.stderr.readline()).decode().split()
    assert (has_imported, own_server) == ("True", "None"), "it cannot have others forked"
    user.kill()
    await wait_until(lambda: not Path("/proc", pid).exists())
    await user.wait()
    server.close()


async def test_a_process_with_threads_does_not_fork_itself(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SELF)
    found = await _run_python(tmp_path / "own.py", "cuda00001800007", "pool")
    assert "a fork would miss the threads ['pool']" in found


async def _run_python(program: Path, *args: str) -> str:
    """Return what a program writes to the standard output, which its forks share, and its
    errors."""
    path = os.pathsep.join((str(ROOT), str(program.parent)))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        *args,
        env={**os.environ, "PYTHONPATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    found, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    return found.decode()
