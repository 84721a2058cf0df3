"""The parser process beside a router (workers/parser.py): its life, and the streams in it.

A process that dies or hangs is replaced, and every stream is parsed there from its beginning; what
was said of it is dropped (router/parsing.py). The process answers one command after the other, so
the stream whose answer was due is the one that ended it. A stream that does so twice fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, cast

from pdserve import framing
from pdserve.errors import InvalidRequest, ParserFailed
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Importing torch and vLLM; more on a machine that is busy.
START_S = 120.0
# Without an answer for so long, the process hangs.
HANG_S = 20.0  # opening a request may load a tokenizer
MAX_FAILURES = 1
COMMAND = (sys.executable, "-m", "workers.parser")


class ParserStream(Protocol):
    """A request in the process, as its owner keeps it."""

    def history(self) -> Iterable[p.ParserCommand]:
        """Return all commands of the request so far."""
        ...

    def on_reply(self, reply: p.ParserReply) -> None: ...
    def on_failed(self, error: ParserFailed) -> None: ...


class ParserProcess:
    """Starts the process when a stream first needs it. State: the streams; the streams whose
    answers are due, oldest first; how often a stream ended the process."""

    def __init__(self, metrics: RouterMetrics, command: Sequence[str] = COMMAND) -> None:
        self._metrics = metrics
        self._command = command
        self._streams: dict[int, ParserStream] = {}
        self._failures: dict[int, int] = {}
        self._due: deque[int] = deque()
        self._last_id = 0
        self._link: _Link | None = None
        self._running: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tokenizers: TemporaryDirectory[str] | None = None

    def open(self, stream: ParserStream) -> int:
        """Return the id of a stream; `send` its first command next."""
        self._last_id += 1
        self._streams[self._last_id] = stream
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="parser-process")
        return self._last_id

    def send(self, command: p.ParserCommand) -> None:
        """Send a command of an open stream, now or when the process has started."""
        if self._link is not None:
            self._due.extend([command.stream_id] * _answers(command))
            self._link.send(command)

    def close_stream(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None:
            self._failures.pop(stream_id, None)
            self.send(p.ParserCommand(stream_id=stream_id, close=p.CloseParser()))

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if self._process is not None:  # the task may have been cancelled while it waited for that
            await self._process.wait()
        if self._tokenizers is not None:
            self._tokenizers.cleanup()

    def tokenizer(self, digest: str, files: Mapping[str, bytes]) -> str:
        """Return the directory with the files of a tokenizer, which are written once."""
        if self._tokenizers is None:
            self._tokenizers = TemporaryDirectory(prefix="pdserve-tokenizers-")
        path = Path(self._tokenizers.name, digest or "none")
        if not path.exists():
            path.mkdir()
            for name, content in files.items():
                (path / Path(name).name).write_bytes(content)
        return str(path)

    async def _run(self) -> None:
        """Run processes, one after the other, as long as there are streams."""
        while True:
            try:
                has_started = await self._run_once()
            except Exception:
                logger.exception("the parser process")
                has_started = False
            if not has_started:
                self._fail(self._streams, "the parser process did not start; see the router's log")
            if not self._streams:
                return
            self._metrics.count("parser_restarts")

    async def _run_once(self) -> bool:
        """Run one process to its end. Return False if it did not start."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--socket", str(theirs.fileno()), "--parent-pid", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        link = _Link(self._on_reply, lambda: bool(self._due))
        try:
            await loop.create_unix_connection(lambda: link, sock=ours)
            ends: tuple[asyncio.Future[Any], ...] = (link.ready, link.ended)
            await asyncio.wait(ends, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not link.ready.done():
                return False
            logger.info("the parser process %d is ready", process.pid)
            self._due.clear()
            self._link = link
            for stream in list(self._streams.values()):
                for command in stream.history():
                    self.send(command)
            reason = await link.ended
            logger.warning("the parser process %d %s", process.pid, reason)
            self._blame()
            return True
        finally:
            self._link = None
            link.close()
            ours.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _blame(self) -> None:
        """Count the failure for the stream whose answer was due."""
        if not self._due or (stream_id := self._due[0]) not in self._streams:
            return
        self._failures[stream_id] = self._failures.get(stream_id, 0) + 1
        if self._failures[stream_id] > MAX_FAILURES:
            self._fail([stream_id], "the parser died or hung twice on this answer")

    def _fail(self, stream_ids: Iterable[int], reason: str) -> None:
        for stream_id in list(stream_ids):
            self._failures.pop(stream_id, None)
            self._streams.pop(stream_id).on_failed(ParserFailed(reason))

    def _on_reply(self, reply: p.ParserReply) -> None:
        self._due.popleft()
        if (stream := self._streams.get(reply.stream_id)) is not None:
            stream.on_reply(reply)


def _answers(command: p.ParserCommand) -> int:
    """Return how many replies the process sends to a command."""
    match command.WhichOneof("command"):
        case "open":
            return 1
        case "input":
            return 2 if command.input.finished else 1
        case _:
            return 0


class _Link(asyncio.Protocol):
    """The connection to one process. `ready` is done when that takes commands; `ended` says why it
    takes no more. It is given up without a reply for HANG_S while `is_due` says that one is."""

    def __init__(
        self, on_reply: Callable[[p.ParserReply], None], is_due: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._on_reply, self._is_due = on_reply, is_due
        self._frames = framing.FrameParser(p.ParserReply)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A check would fail: uvloop's transports have no base in asyncio.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for reply in self._frames.feed(data):
                if reply.stream_id:
                    self._on_reply(reply)
                elif not self.ready.done():
                    self.ready.set_result(None)
        except (InvalidRequest, IndexError) as error:  # or an answer that was not due
            self._end(f"broke its protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._end("died")

    def send(self, command: p.ParserCommand) -> None:
        assert self._transport is not None
        self._transport.write(framing.pack(command))
        if self._timer is None and self._is_due():
            self._heard_at = self._loop.time()
            self._timer = self._loop.call_later(HANG_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_due():
            return
        left_s = self._heard_at + HANG_S - self._loop.time()
        if left_s <= 0:
            self._end(f"did not answer for {HANG_S:g} s")
        else:
            self._timer = self._loop.call_later(left_s, self._check)

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
