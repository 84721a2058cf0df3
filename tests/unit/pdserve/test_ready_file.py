"""The ready file of `pdserve up`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pdserve.deploy.local.ready_file import ReadyFile
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess


def child(name: str, pid: int, **facts: str) -> SupervisedProcess:
    return SupervisedProcess(name, Path("/logs", name), Restarts(1.0), pid=pid, facts=facts)


def test_the_file_names_what_serves_and_can_be_removed_twice(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    file = ReadyFile(str(path), tmp_path)
    routers = [child("router-0", 7, http="http://a:1", grpc="a:2")]
    file.write("m", routers, {"decode-0": child("decode-0", 8, address="a:3")}, {"decode-0": "x"})
    router = {"http": "http://a:1", "grpc": "a:2", "pid": 7, "log": "/logs/router-0"}
    assert json.loads(path.read_text()) == {
        "pid": os.getpid(),
        "model": "m",
        "run_dir": str(tmp_path),
        "http": "http://a:1",
        "grpc": "a:2",
        "router": router,
        "routers": [router],
        "workers": [
            {"worker_id": "decode-0", "role": "x", "address": "a:3", "pid": 8}
            | {"log": "/logs/decode-0"}
        ],
    }
    for _ in range(2):
        file.remove()
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_without_a_path(tmp_path: Path) -> None:
    file = ReadyFile("", tmp_path)
    file.write("m", [child("router-0", 7)], {}, {})
    file.remove()
    assert list(tmp_path.iterdir()) == []
