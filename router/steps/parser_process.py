"""The router's parser process: its replacement, and its streams.

If the process dies or hangs, a new one replaces it and parses every stream again from its start.
Deltas that were already delivered are dropped (router/steps/parse.py). The stream with the oldest
unanswered command ended the process. That stream fails if the process hung, or if the process died
twice. The process itself ends slow parsers in Python code; other streams do not notice.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import AnswerNotParsed, InternalError, ParserFailed, PdserveError
from pdserve.process.child_pool import Child, End
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.process.child_pool import Start
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Importing torch and vLLM takes long, more so on a busy machine.
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
    """The process and its streams. The first stream starts the process. State: the streams; how
    often each stream ended the process; the process that runs, or was the last one."""

    def __init__(self, metrics: RouterMetrics, start: Start, *, delta_s: float = _DELTA_S) -> None:
        """`start` starts a process. `delta_s`: limit of the reply to a part of an answer."""
        self._limits_s = {"open": max(_OPEN_S, delta_s), "input": delta_s}
        self._metrics = metrics
        self._start = start
        self._streams: dict[int, ParserStream] = {}
        self._failures: dict[int, int] = {}
        self._last_id = 0
        self._child: Child[int] | None = None
        self._running: asyncio.Task[None] | None = None
        self._tokenizers: TemporaryDirectory[str] | None = None

    def open(self, stream: ParserStream) -> int:
        """Return the id of a stream; `send` its first command next."""
        self._last_id += 1
        self._streams[self._last_id] = stream
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="parser-process")
        return self._last_id

    def send(self, sent: p.ParserCommand) -> None:
        """Send a command of an open stream, unless the next process reads it with all others."""
        if self._child is not None:
            limit_s = self._limits_s.get(sent.WhichOneof("command") or "", 0.0)
            self._child.call(sent.stream_id, sent.SerializeToString(), limit_s)

    def close_stream(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None:
            self._failures.pop(stream_id, None)
            self.send(p.ParserCommand(stream_id=stream_id, close=p.CloseParser()))

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if self._child is not None:  # the task may have been cancelled during its own wait
            await self._child.close()
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
        child = Child(self._on_reply, start_s=START_S)
        await child.start(self._start)
        self._child = child
        try:
            for stream in list(self._streams.values()):
                for sent in stream.history():
                    self.send(sent)
            end = await asyncio.shield(child.ended)
            logger.warning("the parser process %s", end)
            if child.is_ready:
                self._blame(child, hung=end is End.HUNG)
            return child.is_ready
        finally:
            await child.close()

    def _blame(self, child: Child[int], *, hung: bool) -> None:
        """Count the failure for the stream whose answer was due, or fail it at once."""
        if not child.due or (stream_id := child.due[0][0]) not in self._streams:
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

    def _on_reply(self, stream_id: int, data: bytes) -> None:
        if (stream := self._streams.get(stream_id)) is None:
            return
        reply = p.ParserReply.FromString(data)
        try:
            stream.on_reply(reply)
        except Exception:
            # A fault of one client's writer must not end the process, which serves all.
            logger.exception("a parsed answer")
            error = InternalError("the router failed to pass on the answer; see its log")
            self._fail([stream_id], error)
