"""Logs: the format of a process's own log, a rate limit for each log statement, so that repeated
failures cannot fill the disk, and files of JSON lines (access and audit log)."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BURST = 50
PER_S = 5.0
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The processes that a process starts inherit the format with the environment.
_FORMAT_VARIABLE = "PDSERVE_LOG_FORMAT"
_STDOUT = "-"


def log_to_stderr(level: str, log_format: str = "") -> None:
    """Set up the log of this process. `log_format`: "text" or "json"; "": the format of the parent
    process."""
    log_format = log_format or os.environ.get(_FORMAT_VARIABLE, "text")
    os.environ[_FORMAT_VARIABLE] = log_format
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        # vLLM sets up its own logger when it is imported, in each of its processes.
        path = Path(__file__).with_name("vllm_logging.json")
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(path))
        if "vllm" in sys.modules:  # this process was forked after the import
            logging.config.dictConfig(json.loads(path.read_bytes()))


def set_level(level: str) -> None:
    """Change the level of this process's log."""
    logging.getLogger().setLevel(level.upper())


def time_text(unix_time_s: float) -> str:
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time_text(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LineLog:
    """Appends lines of JSON to a file, or to standard output if the path is "-". A file that was
    moved away, as by logrotate, is created again. A line that cannot be written is lost, and the
    failure is logged."""

    def __init__(self, path: str, key: str) -> None:
        """Raises ConfigError naming `key`, the configuration key of `path`."""
        self._path, self._inode, self._file = path, 0, sys.stdout.fileno()
        try:
            self._reopen()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", field=key) from error

    def write(self, line: Mapping[str, Any]) -> None:
        # One call per line, so that routers may share a file.
        data = json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n"
        try:
            self._reopen()
            os.write(self._file, data)
        except OSError as error:
            logging.getLogger(__name__).error("cannot write %s: %s", self._path, error.strerror)

    def _reopen(self) -> None:
        if self._path == _STDOUT:
            return
        try:
            inode = Path(self._path).stat().st_ino
        except FileNotFoundError:
            inode = 0
        if not inode or inode != self._inode:
            # Private: it names tenants.
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self.close()
            self._file, self._inode = file, os.fstat(file).st_ino

    def close(self) -> None:
        if self._inode:
            os.close(self._file)
            self._inode = 0


class LogLimit(logging.Filter):
    """Limits each log statement to BURST lines at once, then PER_S lines per second (a token
    bucket). The next line that passes gives the number of omitted lines. State, by (file, line):
    tokens, time of the last update, omitted lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        tokens, since, left_out = self._places.get(place, (BURST, now, 0))
        tokens = min(BURST, tokens + PER_S * (now - since))
        if tokens < 1:
            self._places[place] = tokens, now, left_out + 1
            return False
        self._places[place] = tokens - 1, now, 0
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} lines like this were left out)"
            record.args = ()
        return True
