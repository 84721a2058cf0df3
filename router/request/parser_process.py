"""The router's parser process: its start, its replacement, and its streams.

If the process dies or hangs, a new one replaces it and parses every stream again from its start.
Deltas that were already delivered are dropped (router/request/parsing.py). The process answers
commands in order, so the stream with the oldest unanswered command ended it. That stream fails if
the process hung, or if the process died twice. The process itself ends slow parsers in Python code;
other streams do not notice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, cast

from pdserve.errors import AnswerNotParsed, InvalidRequest, ParserFailed, PdserveError
from pdserve.net import framing
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Importing torch and vLLM; more on a machine that is busy.
START_S = 120.0
# The process hangs if a reply takes longer. Wall time; the process also limits its CPU time.
_OPEN_S = 20.0
_DELTA_S = 5.0
MAX_FAILURES = 1


class ParserStream(Protocol):
    """A stream's owner: it keeps the commands and receives the replies."""

    def history(self) -> Iterable[p.ParserCommand]:
        """Return all commands of the request so far."""
        ...

    def on_reply(self, reply: p.ParserReply) -> None: ...
    def on_failed(self, error: PdserveError) -> None: ...


class ParserProcess:
    """The process and its streams. The first stream starts the process. State: the streams; the
    streams with a due reply and its limit, oldest first; how often a stream ended the process."""

    def __init__(
        self, metrics: RouterMetrics, command: Sequence[str], *, delta_s: float = _DELTA_S
    ) -> None:
        """`delta_s`: limit of the reply to a part of an answer."""
        self._limits_s = {"open": max(_OPEN_S, delta_s), "input": delta_s}
        self._metrics = metrics
        self._command = command
        self._streams: dict[int, ParserStream] = {}
        self._failures: dict[int, int] = {}
        self._due: deque[tuple[int, float]] = deque()
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
            if limit_s := self._limits_s.get(command.WhichOneof("command") or ""):
                self._due.append((command.stream_id, limit_s))
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
        if self._process is not None:  # the task may have been cancelled during its own wait
            await self._process.wait()
        if self._tokenizers is not None:
            self._tokenizers.cleanup()

    def tokenizer(self, digest: str, files: Mapping[str, bytes]) -> str:
        """Return the directory with the files of a tokenizer. The first call writes them."""
        if self._tokenizers is None:
            self._tokenizers = TemporaryDirectory(prefix="pdserve-tokenizers-")
        path = Path(self._tokenizers.name, digest or "none")
        if not path.exists():
            path.mkdir()
            for name, content in files.items():
                (path / Path(name).name).write_bytes(content)
        return str(path)

    async def _run(self) -> None:
        """Run one process after another while there are streams."""
        while True:
            try:
                has_started = await self._run_once()
            except Exception:
                logger.exception("the parser process")
                has_started = False
            if not has_started:
                text = "the parser process did not start; see the router's log"
                self._fail(self._streams, ParserFailed(text))
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
                "--socket",
                str(theirs.fileno()),
                "--parent-pid",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        due_s = lambda: self._due[0][1] if self._due else 0.0  # noqa: E731
        link = _Link(self._on_reply, due_s, self._limits_s["input"])
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
            self._blame(hung=link.hung)
            return True
        finally:
            self._link = None
            link.close()
            ours.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _blame(self, *, hung: bool) -> None:
        """Count the failure for the stream whose answer was due, or fail it at once."""
        if not self._due or (stream_id := self._due[0][0]) not in self._streams:
            return
        self._failures[stream_id] = self._failures.get(stream_id, 0) + 1
        if hung:
            self._fail([stream_id], AnswerNotParsed("the parser hung on this answer"))
        elif self._failures[stream_id] > MAX_FAILURES:
            self._fail([stream_id], AnswerNotParsed("the parser died twice on this answer"))

    def _fail(self, stream_ids: Iterable[int], error: PdserveError) -> None:
        for stream_id in list(stream_ids):
            self._failures.pop(stream_id, None)
            self._streams.pop(stream_id).on_failed(error)

    def _on_reply(self, reply: p.ParserReply) -> None:
        self._due.popleft()
        if (stream := self._streams.get(reply.stream_id)) is not None:
            stream.on_reply(reply)


class _Link(asyncio.Protocol):
    """The connection to one process. `ready` completes when the process takes commands. `ended`
    has the reason of its end. The link ends if a reply takes longer than `due_s()` seconds; 0
    means that no reply is due. `least_s` is the shortest limit of a reply."""

    def __init__(
        self, on_reply: Callable[[p.ParserReply], None], due_s: Callable[[], float], least_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._on_reply, self._due_s, self._least_s = on_reply, due_s, least_s
        self._frames = framing.FrameParser(p.ParserReply)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self.hung = False

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
        if self._timer is None and (due_s := self._due_s()):
            self._heard_at = self._loop.time()
            self._timer = self._loop.call_later(min(due_s, self._least_s), self._check)

    def _check(self) -> None:
        self._timer = None
        if not (due_s := self._due_s()):
            return
        left_s = self._heard_at + due_s - self._loop.time()
        if left_s <= 0:
            self.hung = True
            self._end(f"did not answer for {due_s:g} s")
        else:  # a reply with a shorter limit may be due before that
            self._timer = self._loop.call_later(min(left_s, self._least_s), self._check)

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
