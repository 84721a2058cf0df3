"""The parser process of a router: it finds tool calls and reasoning in answers.

vLLM's parsers import torch, and some take milliseconds per token, so they run in a separate
process. One thread handles one command at a time and replies before it reads the next. If the
process dies or hangs, the oldest command without a reply is therefore the cause. An answer that
takes too much CPU time is given up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import AnswerNotParsed, ParserFailed, PdserveError
from pdserve.observe.logs import log_to_stderr
from pdserve.process.child import exit_at_once
from pdserve.process.child_pool import calls, connected, reply
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from types import FrameType

    from workers.vllm.parsing.request_parsers import RequestParsers

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # tokenizers are directories
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

logger = logging.getLogger(__name__)


class _TooSlow(BaseException):
    """Raised inside a parser at the time limit. A BaseException, because vLLM's parsers catch every
    Exception."""


@dataclass(frozen=True, slots=True)
class ParserLimits:
    """Limits in seconds of CPU time, not of wall time, so that a busy machine does not fail an
    answer. A whole answer has `answer_s` plus `token_s` for each of its tokens."""

    open_s: float = 10.0  # may load a tokenizer
    delta_s: float = 1.0
    token_s: float = 0.01
    answer_s: float = 2.0


_LIMITS = ParserLimits()


@dataclass(slots=True)
class _OpenAnswer:
    parsed: RequestParsers
    left_s: float  # of the answer's CPU time


class Parsers:
    """The open requests by their stream id."""

    def __init__(self, limits: ParserLimits = _LIMITS) -> None:
        self._limits = limits
        self._open: dict[int, _OpenAnswer] = {}

    def handle(self, command: p.ParserCommand) -> p.ParserReply | None:
        """Handle `command`. Return its reply, or None if it has none."""
        stream_id = command.stream_id
        reply = p.ParserReply(stream_id=stream_id)
        match command.WhichOneof("command"):
            case "open":
                from workers.vllm.parsing.request_parsers import RequestParsers

                resumed_s = self._limits.token_s * len(command.open.resume_token_ids)
                with _errors_in(reply, ParserFailed), _limited(self._limits.open_s + resumed_s):
                    parsed = RequestParsers(command.open)
                    self._open[stream_id] = _OpenAnswer(parsed, self._limits.answer_s)
                    reply.plan.CopyFrom(parsed.plan)
            case "input":
                given, opened = command.input, self._open.get(stream_id)
                if opened is None:  # it failed, and the router has not read the reply yet
                    given_up = AnswerNotParsed("the answer was given up")
                    reply.error.CopyFrom(wire.error_to_pb(given_up))
                    return reply
                tokens_s = self._limits.token_s * len(given.token_ids)
                limit_s = min(self._limits.delta_s, opened.left_s) + tokens_s
                began = time.process_time()
                with _errors_in(reply, AnswerNotParsed), _limited(limit_s):
                    reply.output.CopyFrom(opened.parsed.parse(given))
                opened.left_s += tokens_s - (time.process_time() - began)
                if reply.HasField("error"):
                    del self._open[stream_id]
            case "close":
                self._open.pop(stream_id, None)
                return None
        return reply


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Raise _TooSlow in this context after `cpu_s` of CPU time. Native code is not interrupted; the
    router kills the process then."""
    signal.setitimer(signal.ITIMER_PROF, max(cpu_s, 0.001))  # 0 would disable the limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise _TooSlow


@contextlib.contextmanager
def _errors_in(
    reply: p.ParserReply, kind: type[ParserFailed] | type[AnswerNotParsed]
) -> Iterator[None]:
    """Write an error in this context into `reply`. Errors of vLLM become `kind`."""
    try:
        yield
    except PdserveError as error:
        reply.error.CopyFrom(wire.error_to_pb(error))
    except _TooSlow:
        logger.warning("an answer is given up: its parser took too long")
        slow = AnswerNotParsed("tool calls and reasoning in this answer take too long to find")
        reply.error.CopyFrom(wire.error_to_pb(slow))
    except Exception as error:
        logger.exception("parser")
        failed = kind(f"the parser raised {type(error).__name__}")
        reply.error.CopyFrom(wire.error_to_pb(failed))


def serve(sock: socket.socket, parsers: Parsers) -> None:
    """Serve a router until it closes the connection. Called on the main thread."""
    signal.signal(signal.SIGPROF, _give_up)
    for data in calls(sock):
        if (answer := parsers.handle(p.ParserCommand.FromString(data))) is not None:
            reply(sock, answer.SerializeToString())


def main() -> None:
    _, sock = connected(argparse.ArgumentParser(prog="workers.parser"))
    log_to_stderr("info")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Garbage collection takes a fifth of the time and frees nothing, while a client waits.
    gc.disable()
    import workers.vllm.parsing.request_parsers  # noqa: F401 - takes seconds, and may fail

    gc.freeze()
    gc.enable()

    router_has_ended = (ConnectionError, KeyboardInterrupt)
    with sock, contextlib.suppress(*router_has_ended):
        serve(sock, Parsers())
    exit_at_once(0)


if __name__ == "__main__":
    main()
