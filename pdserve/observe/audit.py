"""The audit log: who asked for which action of an administrator, and its result; and what guards
said of prompts and answers."""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.errors import PdserveError
from pdserve.observe.logs import LineLog, time_text

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)
# Independent of the level of the process's log.
logger.setLevel(logging.INFO)


class Caller(NamedTuple):
    """`by`: the key, as the beginning of its hash in the configuration, or the certificate.
    `address`: source address of the call."""

    by: str
    address: str = ""


class AuditLog:
    """Without a file, the lines go to the process's log."""

    def __init__(self, file: LineLog | None = None) -> None:
        self._file = file

    @contextmanager
    def action(self, caller: Caller, action: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Log an action at the end of the context. What is put into the dictionary that the context
        yields is logged too, such as a `result`."""
        line = {"by": caller.by, "from": caller.address, **details}
        result = "cancelled"
        try:
            yield line
            result = "ok"
        except PdserveError as error:
            result = f"{error.code}: {error.message}"
            raise
        except Exception as error:
            result = f"failed: {error!r}"
            raise
        finally:
            self.entry(action, **{**line, "result": line.get("result", result)})

    def entry(self, action: str, **details: Any) -> None:
        """Log an action."""
        line = {"time": time_text(time.time()), "action": action, **details}
        if self._file is not None:
            self._file.write(line)
        else:
            logger.info("audit: %s", json.dumps(line, ensure_ascii=False, default=str))


@contextmanager
def open_audit_log(path: str) -> Iterator[AuditLog]:
    """Open the log for the context. Raises ConfigError if its file cannot be written."""
    file = LineLog(path, "log.audit") if path else None
    try:
        yield AuditLog(file)
    finally:
        if file is not None:
            file.close()
