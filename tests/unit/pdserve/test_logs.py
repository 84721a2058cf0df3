"""What logs may take of the disk."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.observe.logs import BURST, PER_S, LineLog, LogLimit
from pdserve.process import logs
from pdserve.process.forkserver import launched
from pdserve.process.logs import BACKUPS, rotate
from tests.support.router_stack import Clock
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path


def test_a_log_that_a_child_writes_through_an_inherited_descriptor_is_rotated(
    tmp_path: Path,
) -> None:
    log = tmp_path / "w.log"
    echo = [sys.executable, "-uc", "import sys\nfor line in sys.stdin: print(line, end='')"]
    with log.open("ab") as file:
        child = subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=file)
    assert child.stdin is not None
    for number in range(BACKUPS + 2):
        line = f"line {number}\n".encode()
        child.stdin.write(line)
        child.stdin.flush()
        while not log.stat().st_size:
            assert child.poll() is None
        assert log.read_bytes() == line
        rotate(log, len(line) - 1)
    child.stdin.close()
    assert child.wait(WAIT_S) == 0
    files = {x.name: x.read_text() for x in tmp_path.iterdir()}
    kept = {f"w.log.{n}": f"line {BACKUPS + 2 - n}\n" for n in range(1, BACKUPS + 1)}
    assert files == {"w.log": "", **kept}


def test_on_a_full_disk_a_log_is_cut_without_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs.shutil, "copyfile", no_space)
    log = tmp_path / "w.log"
    log.write_text("text")
    with pytest.raises(OSError, match="No space left"):
        rotate(log, 1)
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("w.log", "")]


async def test_the_log_of_a_launched_process_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    words = ("pdserve", "router", "--http-port", "0", "--grpc-port", "0")
    async with (
        asyncio.timeout(WAIT_S),
        launched(None, *words, env=os.environ, log=log, max_log_bytes=10) as (_, reports),
    ):
        assert b"ready" in await reports.readline()
        with log.open("ab") as file:
            file.write(b"more than ten bytes\n")
        await wait_until(log.with_name("w.log.1").exists)
    assert b"more than ten bytes" in log.with_name("w.log.1").read_bytes()


def test_a_flood_of_one_line_is_limited_and_other_lines_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, written = Clock(), list[str]()
    limit, logger = LogLimit(clock), logging.getLogger("tests.flood")

    def write(record: logging.LogRecord) -> bool:
        if limit.filter(record):
            written.append(record.getMessage())
        return False

    monkeypatch.setattr(logger, "filters", [write])

    def flood(count: int) -> None:
        for number in range(count):
            logger.warning("request %d failed", number)

    flood(10 * BURST)
    assert written == [f"request {n} failed" for n in range(BURST)]
    logger.warning("another %s", "line")
    assert written.pop() == "another line"
    clock.now += 1.0
    del written[:]
    flood(BURST)
    assert len(written) == PER_S
    assert written[:2] == [
        f"request 0 failed ({9 * BURST} lines like this were left out)",
        "request 1 failed",
    ]


def test_a_log_in_json_has_a_line_for_each_record_of_ours_and_of_vllm() -> None:
    code = """
import logging, logging.config, json, os
from pdserve.errors import ConfigError
from pdserve.observe.logs import log_to_stderr
log_to_stderr("info", "json")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("pdserve.x").exception("two\\nlines")
logging.config.dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
logging.getLogger("vllm.engine").warning("slow")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    ours, vllm = map(json.loads, done.stderr.splitlines())
    assert (ours["level"], ours["logger"], ours["message"]) == ("error", "pdserve.x", "two\nlines")
    assert "ZeroDivisionError" in ours["exception"]
    assert (vllm["level"], vllm["logger"], vllm["message"]) == ("warning", "vllm.engine", "slow")


def test_a_file_of_lines_is_made_anew_after_it_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = LineLog(str(path), "log.access")
    log.write({"n": 1})
    path.rename(tmp_path / "old")
    log.write({"n": 2})
    log.close()
    assert [(tmp_path / "old").read_text(), path.read_text()] == ['{"n": 1}\n', '{"n": 2}\n']
    with pytest.raises(ConfigError, match="no/such/log"):
        LineLog("no/such/log", "log.access")
