"""Files that are read again when they have changed, and the secrets in one."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from pdserve.config import refuse
from pdserve.config.watch import file_state
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
logger = logging.getLogger(__name__)

MIN_TOKEN_CHARS = 32
# The processes of a service read a new secret at different times.
OVERLAP_S = 600.0


class WatchedFiles(Generic[T]):
    """Cached result of `load()`. It is loaded again when a file at `paths` has changed. If that
    fails, the old result stays in use."""

    def __init__(self, load: Callable[[], T], paths: Iterable[str], what: str) -> None:
        """`what` names the files in the log. Raises ConfigError."""
        self._load, self._paths, self._what = load, [path for path in paths if path], what
        self._lock = threading.Lock()  # gRPC calls `now` in its own threads
        self.errors = 0
        self._seen = self._state()
        self._loaded = load()

    def now(self) -> T:
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen, names = state, ", ".join(self._paths)
                try:
                    self._loaded = self._load()
                    logger.info("reloaded %s: %s", self._what, names)
                except ConfigError as error:
                    self.errors += 1
                    text = "cannot reload %s, the old ones stay in use: %s"
                    logger.error(text, self._what, error)
            return self._loaded

    def _state(self) -> list[tuple[int, ...] | None]:
        return [file_state(path) for path in self._paths]


class FileTokens:
    """The secrets in a file, one a line. Secrets removed by the last change stay valid for
    OVERLAP_S."""

    def __init__(self, path: str, at: str) -> None:
        """`at` is the configuration key of `path`. Raises ConfigError."""
        self._files = WatchedFiles(lambda: read_tokens(path, at), [path], "secrets")
        self._current = self._files.now()
        self._before: tuple[str, ...] = ()
        self._until = 0.0

    def now(self) -> tuple[str, ...]:
        current = self._files.now()
        if current != self._current:
            self._before, self._current = self._current, current
            self._until = time.monotonic() + OVERLAP_S
        if self._before and time.monotonic() > self._until:
            self._before = ()
        return tuple(dict.fromkeys((*current, *self._before)))


def read_tokens(path: str, at: str) -> tuple[str, ...]:
    """Return the secrets in a file. Errors do not contain the file's content."""
    try:
        lines = Path(path).read_text("ascii", "replace").splitlines()
    except OSError as error:
        refuse(at, f"cannot read {path}: {error.strerror or error}")
    tokens = tuple(line.strip() for line in lines if line.strip())
    for token in tokens or ("",):
        usable = token.isascii() and token.isprintable() and " " not in token
        if len(token) < MIN_TOKEN_CHARS or not usable:
            reason = f"must hold lines of at least {MIN_TOKEN_CHARS} printable characters"
            refuse(at, f"{path} {reason}, each one secret")
    return tokens
