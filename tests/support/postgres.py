"""A PostgreSQL server for one test, on a loopback port."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

# Debian does not put the server's programs on the PATH.
_FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
_PROGRAMS = next((x for x in reversed(_FOUND) if (x / "initdb").exists()), None)
needs_postgres = pytest.mark.skipif(
    _PROGRAMS is None, reason="needs PostgreSQL's server (make test-tools)"
)


class PostgresServer:
    def __init__(self, folder: Path) -> None:
        assert _PROGRAMS is not None
        self._programs, self._data = _PROGRAMS, folder / "data"
        # The server refuses to run as root.
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            shutil.chown(folder, nobody.pw_uid, nobody.pw_gid)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._run("initdb", "--username", "test", "--auth", "trust", "--no-sync")
        self._databases = 0

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self._port} -k '' -F"
        log = str(self._data / "log")
        self._run("pg_ctl", "start", "--wait", "--options", options, "--log", log)

    def stop(self) -> None:
        """Stop the server at once, as if the host lost power."""
        self._run("pg_ctl", "stop", "--mode", "immediate")

    def new_database(self) -> str:
        """Create an empty database and return its address."""
        self._databases += 1
        name = f"test{self._databases}"
        address = f"postgresql://test@127.0.0.1:{self._port}"
        self._run("psql", f"{address}/postgres", "-c", f"CREATE DATABASE {name}", data=False)
        return f"{address}/{name}"

    def _run(self, program: str, *options: str, data: bool = True) -> None:
        where = ("-D", str(self._data)) if data else ()
        subprocess.run(
            [str(self._programs / program), *where, *options],
            check=True,
            timeout=WAIT_S,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._user,
        )


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    # Not in pytest's folder, which only the user of the tests may enter.
    with tempfile.TemporaryDirectory(prefix="pdserve-postgres-") as folder:
        server = PostgresServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
